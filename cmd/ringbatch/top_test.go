// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"
)

// shows waits until the screen has all of these texts.
func (c *cli) shows(p *pty, what string, texts ...string) {
	c.t.Helper()
	ok := func() bool {
		screen := p.text()
		for _, text := range texts {
			if !strings.Contains(screen, text) {
				return false
			}
		}
		return true
	}
	if waitFor(ok) != nil {
		c.t.Fatalf("%s: the screen never shows %q:\n%s", what, texts, p.text())
	}
}

func TestTopShowsTheBrokerLiveAndFollowsSizesAndTheBroker(t *testing.T) {
	c := startCLI(t)
	second := "[[model]]\nname = \"second\"\ninputs = [\"x:u8[1]\"]\noutputs = [\"y:u8[1]\"]\n"
	c.reload(c.served(2, 2, 0) + second)
	c.must("ready", "affine", "--wait", "2m")
	c.ask(40, 4)
	p := c.inTerminal(140, 30, "top", "--interval", "100ms")
	c.shows(p, "at first", "broker pid "+fmt.Sprint(c.broker.Pid()), "affine", "second", "affine-0 #", "affine-1 #", "last 10 s",
		"not ready: no worker attached")
	p.press("s")
	c.shows(p, "sorted by requests/s", "sort: req/s", "req/s*")

	p.resize(48, 12)
	c.shows(p, "a small terminal", "affine", "…")
	foot := func() bool { return strings.HasPrefix(strings.Split(p.text(), "\n")[11], "q quit") }
	if waitFor(foot) != nil { // it is drawn last
		t.Errorf("the foot is not the last line of 12:\n%s", p.text())
	}
	p.resize(140, 30)
	c.shows(p, "a large one again", "affine-1 #", "restarts")

	c.broker.Signal(syscall.SIGKILL)
	_ = c.broker.Wait(patience)
	c.shows(p, "without a broker", "no answer since ", "affine-1 #")
	c.broker = c.start("broker", "--config", c.config, "--log-level", "warn")
	c.shows(p, "with another broker", "broker pid "+fmt.Sprint(c.broker.Pid()))
	if waitFor(func() bool { return !strings.Contains(p.text(), "no answer") }) != nil { // a screen is drawn line by line
		t.Errorf("it still says that there is none:\n%s", p.text())
	}
	p.press("q")
	p.leaves("q")
}

func TestTopLeavesTheTerminalCleanHoweverItEnds(t *testing.T) {
	c := startCLI(t)
	for how, end := range map[string]func(*pty){
		"q":       func(p *pty) { p.press("q") },
		"Ctrl-C":  func(p *pty) { p.press("\x03") },
		"SIGINT":  func(p *pty) { _ = p.cmd.Process.Signal(syscall.SIGINT) },
		"SIGTERM": func(p *pty) { _ = p.cmd.Process.Signal(syscall.SIGTERM) },
		"Ctrl-Z, and SIGTERM later": func(p *pty) {
			p.press("\x1a")
			c.until("it has stopped", func() bool { return stateOf(p.cmd.Process.Pid) == "T" })
			if p.termios() != p.before || waitFor(func() bool { return !p.mode("?1049") }) != nil {
				t.Error("while it is stopped, the terminal is not as it was")
			}
			_ = p.cmd.Process.Signal(syscall.SIGCONT)
			c.until("it is back", func() bool { return p.mode("?1049") && p.termios() != p.before })
			c.shows(p, "after SIGCONT", "affine")
			_ = p.cmd.Process.Signal(syscall.SIGTERM)
		},
	} {
		p := c.inTerminal(80, 24, "top", "affine")
		c.shows(p, how, "affine", "q quit")
		end(p)
		p.leaves(how)
	}
	// A terminal that goes away takes it along.
	p := c.inTerminal(80, 24, "top")
	c.shows(p, "before the terminal goes", "affine")
	p.master.Close()
	select {
	case <-p.ended:
	case <-time.After(patience):
		t.Error("it outlives its terminal")
	}
	// Without a broker it waits for one.
	p = c.inTerminal(80, 24, "top", "--socket", c.bed.Path("nobody.sock"))
	c.shows(p, "no broker", "no answer from the broker", "no broker")
	p.press("q")
	p.leaves("q without a broker")
}

func TestTopSaysWhatToDoWhereThereIsNoTerminal(t *testing.T) {
	c := startCLI(t)
	if out, code := c.run("top"); code != 1 || !strings.Contains(out, "stats --interval") || strings.Contains(out, "\x1b") {
		t.Errorf("top into a pipe: %d %q", code, out)
	}
	if out, code := c.run("top", "--interval", "1ms"); code != 2 || !strings.Contains(out, "at least 100ms") {
		t.Errorf("top --interval 1ms: %d %q", code, out)
	}
}

// hasEnded reports whether a process has ended. In some containers init never reaps
// processes whose parent is dead.
func hasEnded(pid int) bool {
	state := stateOf(pid)
	return state == "" || state == "Z" || state == "X"
}

// stateOf is the state of a process, as /proc has it; "" if it is not there.
func stateOf(pid int) string {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return ""
	}
	_, after, _ := strings.Cut(string(text), ") ")
	state, _, _ := strings.Cut(after, " ")
	return state
}
