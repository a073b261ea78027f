// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/test/testbed"
)

// brokerInto starts a second broker whose log goes into a pipe, from which
// the caller may read.
func (c *cli) brokerInto(config string) (b *testbed.Process, socket string, log *os.File) {
	c.t.Helper()
	file := c.bed.Path("c.toml")
	socket = c.bed.Path("b.sock")
	log, w, err := os.Pipe()
	must.Do(c.t, err)
	c.t.Cleanup(func() { _ = log.Close() })
	defer w.Close()
	must.Do(c.t, os.WriteFile(file, []byte(config), 0o600))
	b, err = c.bed.Start(testbed.Spec{Command: []string{c.bin, "broker", "--config", file, "--socket", socket}, Output: w})
	must.Do(c.t, err)
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
		c.must("stats", "--socket", socket)
	}
	c.ends(b)
}

func TestTheLogOnATerminalIsShortAndLeavesAWorkersOutputAsItIs(t *testing.T) {
	c := startCLI(t)
	c.write("[[worker]]\ncommand = [\"sh\", \"-c\", \"printf 'Traceback (most recent call last):\\\\n  File\\\\nValueError: " +
		"x\\\\n'; exec sleep 1000\"]\n")
	p := c.inTerminal(100, 24, "broker", "--config", c.config, "--socket", c.bed.Path("b.sock"))
	p.shows("worker-0 | Traceback (most recent call last):", "worker-0 |   File", "worker-0 | ValueError: x",
		" broker listening socket=")
	if text := p.text(); strings.Contains(text, "level=") || strings.Contains(text, "msg=") {
		t.Error(text)
	}
	p.interrupt()
}
