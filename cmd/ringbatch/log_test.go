package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// stuck is a reader that does not read until it is told to.
type stuck struct {
	entered, read chan struct{}
	text          strings.Builder
}

func (s *stuck) Write(b []byte) (int, error) {
	select {
	case s.entered <- struct{}{}:
	case <-s.read:
	}
	<-s.read
	return s.text.Write(b)
}

func TestALogThatNobodyReadsLosesLinesAndSaysHowMany(t *testing.T) {
	r := &stuck{entered: make(chan struct{}), read: make(chan struct{})}
	l := newLogWriter(r, 2)
	line := func(i int) {
		if n, err := fmt.Fprintf(l, "line %d\n", i); n != len("line 0\n") || err != nil {
			t.Fatalf("%d, %v", n, err)
		}
	}
	line(0)
	<-r.entered
	for i := 1; i < 10; i++ { // two have room
		line(i)
	}
	close(r.read)
	l.end()
	if text := r.text.String(); !strings.HasPrefix(text, "line 0\nline 1\nline 2\ntime=") || !strings.HasSuffix(text, " lines=7\n") {
		t.Errorf("the log is\n%s", text)
	}
}

func TestABrokerWhoseLogIsNotReadGoesOn(t *testing.T) {
	c := startCLI(t)
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	dir := shortDir(t)
	config, socket := filepath.Join(dir, "c.toml"), filepath.Join(dir, "b.sock")
	if err := os.WriteFile(config, []byte("[[worker]]\ncommand = [\"yes\"]\nstop_time = \"100ms\"\n"), 0o600); err != nil { // which fills any pipe
		t.Fatal(err)
	}
	b := exec.Command(c.bin, "broker", "--config", config, "--socket", socket)
	b.Stdout, b.Stderr = w, w
	err = b.Start()
	w.Close()
	if err != nil {
		t.Fatal(err)
	}
	killed(t, b)
	c.until("its worker runs", func() bool {
		out, _ := c.run("stats", "--json", "--socket", socket)
		return strings.Contains(out, `"running"`)
	})
	for range 50 { // by now the pipe is full
		if out, code := c.run("stats", "--socket", socket); code != 0 {
			t.Fatalf("stats: %d\n%s", code, out)
		}
	}
	_ = b.Process.Signal(syscall.SIGTERM)
	if err := b.Wait(); err != nil {
		t.Errorf("broker: %v", err)
	}
}
