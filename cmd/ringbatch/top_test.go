// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/admin/stats"
	"github.com/ringbatch/ringbatch/internal/must"
)

// pty is a pseudo-terminal with a program in it.
type pty struct {
	t      *testing.T
	master *os.File
	cmd    *exec.Cmd
	mu     sync.Mutex
	said   strings.Builder
}

// inTerminal starts the command in a terminal of that size.
func (c *cli) inTerminal(width, height uint16, args ...string) *pty {
	c.t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		c.t.Skip("no pseudo-terminals here: ", err)
	}
	must.Do(c.t, unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0))
	number, err := unix.IoctlGetInt(int(master.Fd()), unix.TIOCGPTN)
	must.Do(c.t, err)
	slave, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|unix.O_NOCTTY, 0)
	must.Do(c.t, err)
	defer slave.Close()
	must.Do(c.t, unix.IoctlSetWinsize(int(master.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: height, Col: width}))
	p := &pty{t: c.t, master: master, cmd: exec.Command(c.bin, args...)}
	p.cmd.Stdin, p.cmd.Stdout, p.cmd.Stderr = slave, slave, slave
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true, Pdeathsig: syscall.SIGKILL}
	must.Do(c.t, p.cmd.Start())
	read := make(chan struct{})
	go func() {
		defer close(read)
		for b := make([]byte, 4096); ; {
			n, err := master.Read(b)
			if err != nil {
				return // the program has ended
			}
			p.mu.Lock()
			p.said.Write(b[:n])
			p.mu.Unlock()
		}
	}()
	c.t.Cleanup(func() { _ = p.cmd.Process.Kill(); master.Close(); <-read })
	return p
}

// text is all that the terminal got.
func (p *pty) text() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.said.String()
}

// shows waits until the terminal has got all of these texts.
func (p *pty) shows(texts ...string) {
	p.t.Helper()
	for _, text := range texts {
		if waitFor(func() bool { return strings.Contains(p.text(), text) }) != nil {
			p.t.Fatalf("it never shows %q:\n%s", text, p.text())
		}
	}
}

// interrupt presses Ctrl-C, and waits for the end.
func (p *pty) interrupt() {
	_, err := p.master.WriteString("\x03")
	must.Check(p.t, errors.Join(err, p.cmd.Wait()))
}

func TestTopShowsTheBrokerLiveAndFollowsTheBroker(t *testing.T) {
	c := startCLI(t)
	second := "[[model]]\nname = \"second\"\ninputs = [\"x:u8[1]\"]\noutputs = [\"y:u8[1]\"]\n"
	c.reload(c.served(2, 2, 0) + second)
	c.must("ready", "affine", "--wait", "2m")
	c.ask(40, 4)
	p := c.inTerminal(140, 30, "top", "--interval", "100ms")
	p.shows("\x1b[H", "broker pid "+fmt.Sprint(c.broker.Pid()), "affine", "second", "affine-0 #", "affine-1 #", "last 10 s",
		"not ready: no worker attached")
	small := c.inTerminal(30, 5, "top", "affine", "--interval", "100ms")
	small.shows("…", "\x1b[J")
	for _, line := range strings.Split(strings.Split(small.text(), "\x1b[J")[0], "\r\n") {
		if n := len([]rune(strings.NewReplacer("\x1b[H", "", "\x1b[K", "").Replace(line))); n > 30 {
			t.Errorf("%d columns: %q", n, line)
		}
	}
	if n := strings.Count(strings.Split(small.text(), "\x1b[J")[0], "\n"); n > 4 || strings.Contains(small.text(), "second") {
		t.Errorf("%d lines of 5, of one model:\n%s", n, small.text())
	}
	small.interrupt()
	into := c.start("top", "--interval", "100ms") // a pipe: one table below the other
	c.broker.Signal(syscall.SIGKILL)
	_ = c.broker.Wait(patience)
	p.shows("no answer since ")
	c.broker = c.start("broker", "--config", c.config, "--log-level", "warn")
	p.shows("broker pid " + fmt.Sprint(c.broker.Pid()))
	p.interrupt()
	c.until("the pipe has two tables", func() bool { return strings.Count(into.Log(), "worker ") > 1 })
	if strings.Contains(into.Log(), "\x1b") {
		t.Errorf("escape sequences in a pipe: %q", into.Log())
	}
	c.ends(into)
	if out, code := c.run("top", "--interval", "1ms"); code != 2 || !strings.Contains(out, "at least 100ms") {
		t.Errorf("top --interval 1ms: %d %q", code, out)
	}
}

func TestNoTextOfAPeerLeavesItsLineInTop(t *testing.T) {
	m := stats.Model{Name: "evil\x1b[2J\nname", Workers: []stats.Worker{{Name: "w\n", GPU: "\x1b"}}}
	for _, view := range []*top{{err: errors.New("a\x1b[2Jb")}, {now: &stats.Broker{Models: []stats.Model{m}}, at: time.Now(),
		err: errors.New("gone\x1b")}} {
		for _, line := range view.lines() {
			if strings.ContainsAny(line, "\x1b\n") {
				t.Errorf("%q", line)
			}
		}
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
