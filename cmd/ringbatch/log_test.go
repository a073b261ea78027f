// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/internal/testbed"
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
	l := newLogWriter(r, 2, func(n int64) string { return fmt.Sprintf("lost=%d\n", n) })
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
	if text := r.text.String(); !strings.HasPrefix(text, "line 0\nline 1\nline 2\n") || !strings.HasSuffix(text, "lost=7\n") {
		t.Errorf("the log is\n%s", text)
	}
}

// brokerInto starts a second broker whose log goes into a pipe, from which
// the caller may read.
func (c *cli) brokerInto(config string) (b *testbed.Process, socket string, log *os.File) {
	c.t.Helper()
	file := c.bed.Path("c.toml")
	socket = c.bed.Path("b.sock")
	log, w, err := os.Pipe()
	if err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() { _ = log.Close() })
	defer w.Close()
	if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
		c.t.Fatal(err)
	}
	b, err = c.bed.Start(testbed.Spec{Command: []string{c.bin, "broker", "--config", file, "--socket", socket}, Output: w})
	if err != nil {
		c.t.Fatal(err)
	}
	return b, socket, log
}

func TestABrokerOutlivesTheReaderOfItsLog(t *testing.T) {
	c := startCLI(t)
	b, socket, log := c.brokerInto("")
	log.Close() // before it logs that it listens, or after
	c.until("it answers", func() bool { _, code := c.run("stats", "--socket", socket); return code == 0 })
	b.Signal(syscall.SIGHUP) // of which it logs the outcome, too
	c.until("it still answers", func() bool { _, code := c.run("stats", "--socket", socket); return code == 0 })
	c.ends(b)
}

func TestABrokerWhoseLogIsNotReadGoesOn(t *testing.T) {
	c := startCLI(t)
	b, socket, _ := c.brokerInto("[[worker]]\ncommand = [\"yes\"]\nstop_time = \"100ms\"\n") // which fills any pipe
	c.until("its worker runs", func() bool {
		out, _ := c.run("stats", "--json", "--socket", socket)
		return strings.Contains(out, `"running"`)
	})
	for range 50 { // by now the pipe is full
		if out, code := c.run("stats", "--socket", socket); code != 0 {
			t.Fatalf("stats: %d\n%s", code, out)
		}
	}
	c.ends(b)
}

func TestALogInJSONIsOneObjectALine(t *testing.T) {
	var text strings.Builder
	log, w, err := (&logFlags{level: "info", format: "json"}).open(&text)
	if err != nil {
		t.Fatal(err)
	}
	log.Info("two\nlines", "model", "m", "wait", time.Second)
	log.Debug("not asked for")
	w.lost.Add(3)
	log.Warn("then")
	w.end()
	lines := strings.Split(strings.TrimSuffix(text.String(), "\n"), "\n")
	for _, line := range lines {
		var v map[string]any
		if err := json.Unmarshal([]byte(line), &v); err != nil || v["msg"] == "" || v["time"] == "" || v["level"] == "" {
			t.Errorf("%q: %v", line, err)
		}
	}
	if len(lines) != 3 {
		t.Errorf("%d lines:\n%s", len(lines), &text)
	}
	if _, _, err := (&logFlags{level: "info", format: "xml"}).open(&text); err == nil {
		t.Error("a format that there is not was taken")
	}
}
