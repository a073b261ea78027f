// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/broker/supervise"
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

func TestTheLogOnATerminalIsShortAndLeavesAWorkersOutputAsItIs(t *testing.T) {
	c := startCLI(t)
	c.write("[[worker]]\ncommand = [\"sh\", \"-c\", \"printf 'Traceback (most recent call last):\\\\n  File\\\\nValueError: " +
		"x\\\\n'; exec sleep 1000\"]\n")
	p := c.inTerminal(100, 24, "broker", "--config", c.config, "--socket", c.bed.Path("b.sock"))
	c.shows(p, "the log", "worker-0 | Traceback (most recent call last):", "worker-0 |   File", "worker-0 | ValueError: x",
		" broker listening socket=")
	if text := p.text(); strings.Contains(text, "level=") || strings.Contains(text, "msg=") {
		t.Error(text)
	}
	p.press("\x03")
	<-p.ended
}

func TestAWarningOnATerminalHasTheOutputThatItsLogLeavesOut(t *testing.T) {
	for level, want := range map[slog.Level]string{
		slog.LevelInfo: "WARN it ended worker=w in=1s\n",
		slog.LevelWarn: "WARN it ended worker=w in=1s\n   | why\n   | \\x1b[31m\n",
	} {
		var text strings.Builder
		log := slog.New(&terminalLog{w: &text, level: level})
		log.Warn("it ended", "worker", "w", "in", time.Second, "gpu", "", "id", 7, "output", supervise.Said("why\n\x1b[31m"))
		if got := text.String()[len("15:04:05 "):]; got != want {
			t.Errorf("%v: %q, want %q", level, got, want)
		}
	}
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
