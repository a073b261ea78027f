package main

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

func TestALogThatNobodyReadsLosesLinesAndSaysHowMany(t *testing.T) {
	r, w := io.Pipe() // without a reader, every write blocks
	l := newLogWriter(w, 2)
	for i := range 10 {
		if n, err := fmt.Fprintf(l, "line %d\n", i); n != len("line 0\n") || err != nil {
			t.Fatalf("%d, %v", n, err)
		}
	}
	go func() {
		l.end()
		w.Close()
	}()
	read, lost := 0, 0
	for in := bufio.NewScanner(r); in.Scan(); {
		n := 0
		if _, err := fmt.Sscanf(in.Text(), "line %d", &n); err == nil {
			read++
		} else if _, after, ok := strings.Cut(in.Text(), "lines="); ok {
			_, _ = fmt.Sscan(after, &n)
			lost += n
		}
	}
	if read < 2 || read > 3 || read+lost != 10 { // one in the writer's hands, two in the queue
		t.Errorf("%d lines read, %d lost of 10", read, lost)
	}
}

func TestABrokerWhoseLogIsNotReadGoesOn(t *testing.T) {
	c := startCLI(t)
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	dir := t.TempDir()
	config, socket := filepath.Join(dir, "c.toml"), filepath.Join(dir, "private", "b.sock")
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
