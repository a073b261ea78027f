// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"unicode"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/internal/must"
)

// pty is a pseudo-terminal with a program in it. It understands the sequences
// that top writes; any other is an error, and so is a character that does not
// print.
type pty struct {
	t      *testing.T
	master *os.File
	cmd    *exec.Cmd
	before unix.Termios
	ended  chan error

	mu      sync.Mutex
	screen  [][]rune
	row     int
	col     int
	modes   map[string]bool // of ?25 and the like
	pending []byte
	strange []string
}

// inTerminal starts the command in a terminal of that size.
func (c *cli) inTerminal(width, height int, args ...string) *pty {
	c.t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		c.t.Skip("no pseudo-terminals here: ", err)
	}
	var number int
	must.Do(c.t, unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0))
	if number, err = unix.IoctlGetInt(int(master.Fd()), unix.TIOCGPTN); err != nil {
		c.t.Fatal(err)
	}
	slave, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|unix.O_NOCTTY, 0)
	must.Do(c.t, err)
	defer slave.Close()
	p := &pty{t: c.t, master: master, cmd: exec.Command(c.bin, args...), ended: make(chan error, 1),
		modes: map[string]bool{"?7": true, "?25": true}}
	p.before = p.termios()
	p.resize(width, height)
	p.cmd.Env = append(os.Environ(), "TERM=xterm")
	p.cmd.Stdin, p.cmd.Stdout, p.cmd.Stderr = slave, slave, slave
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true, Pdeathsig: syscall.SIGKILL}
	must.Do(c.t, p.cmd.Start())
	read := make(chan struct{})
	go func() {
		defer close(read)
		var b [4096]byte
		for {
			n, err := p.master.Read(b[:])
			if err != nil {
				return // the program has ended
			}
			p.take(b[:n])
		}
	}()
	go func() { p.ended <- p.cmd.Wait() }()
	c.t.Cleanup(func() {
		_ = p.cmd.Process.Kill()
		master.Close()
		<-read
		for _, s := range p.strange {
			c.t.Errorf("the terminal got %s", s)
		}
	})
	return p
}

func (p *pty) termios() unix.Termios {
	p.t.Helper()
	now, err := unix.IoctlGetTermios(int(p.master.Fd()), unix.TCGETS) // the slave's, too
	must.Do(p.t, err)
	return *now
}

// resize sets the size; the kernel signals the program.
func (p *pty) resize(width, height int) {
	p.mu.Lock()
	p.screen = make([][]rune, height)
	for i := range p.screen {
		p.screen[i] = []rune(strings.Repeat(" ", width))
	}
	p.mu.Unlock()
	must.Do(p.t, unix.IoctlSetWinsize(int(p.master.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: uint16(height), Col: uint16(width)}))
}

func (p *pty) press(keys string) {
	if _, err := p.master.WriteString(keys); err != nil {
		p.t.Error(err)
	}
}

// text is the text on the screen.
func (p *pty) text() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	var lines []string
	for _, l := range p.screen {
		lines = append(lines, strings.TrimRight(string(l), " "))
	}
	return strings.Join(lines, "\n")
}

func (p *pty) mode(name string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.modes[name]
}

func (p *pty) take(b []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	b = append(p.pending, b...)
	for len(b) > 0 {
		n := p.one(string(b))
		if n == 0 {
			break
		}
		b = b[n:]
	}
	p.pending = append([]byte(nil), b...)
}

// one takes a character or a sequence, and returns its length, 0 if it is not
// whole.
func (p *pty) one(s string) int {
	if s[0] == '\x1b' {
		end := strings.IndexFunc(s, func(r rune) bool { return r >= '@' && r != '[' })
		switch {
		case end < 0:
			return 0
		case !strings.HasPrefix(s, "\x1b["):
			p.strange = append(p.strange, fmt.Sprintf("%q", s[:end+1]))
		default:
			p.sequence(s[2:end], s[end])
		}
		return end + 1
	}
	r := []rune(s)[0]
	if r == unicode.ReplacementChar && len(s) < 4 {
		return 0
	}
	switch {
	case r == '\r':
		p.col = 0
	case r == '\n':
		p.row++
	case !unicode.IsPrint(r):
		p.strange = append(p.strange, fmt.Sprintf("%q", r))
	case p.row < len(p.screen) && p.col < len(p.screen[p.row]):
		p.screen[p.row][p.col] = r
		p.col++
	}
	return len(string(r))
}

func (p *pty) sequence(parameters string, command byte) {
	switch {
	case command == 'm':
	case command == 'H':
		_, _ = fmt.Sscanf(parameters, "%d;%d", &p.row, &p.col)
		p.row--
		p.col--
	case command == 'K' && p.row >= len(p.screen): // drawn for a screen that has become smaller
	case command == 'K':
		for i := p.col; i < len(p.screen[p.row]); i++ {
			p.screen[p.row][i] = ' '
		}
	case command == 'J':
		for _, l := range p.screen {
			for i := range l {
				l[i] = ' '
			}
		}
	case command == 'h' || command == 'l':
		p.modes[parameters] = command == 'h'
	default:
		p.strange = append(p.strange, fmt.Sprintf("CSI %s%c", parameters, command))
	}
}

// leaves waits for the program's end, and looks whether the terminal is as it
// was.
func (p *pty) leaves(how string) {
	p.t.Helper()
	select {
	case err := <-p.ended:
		if err != nil {
			p.t.Errorf("%s: %v\n%s", how, err, p.text())
		}
	case <-time.After(patience):
		p.t.Fatalf("%s: it goes on\n%s", how, p.text())
	}
	if now := p.termios(); now != p.before {
		p.t.Errorf("%s: the terminal is %+v, was %+v", how, now, p.before)
	}
	for mode, want := range map[string]bool{"?1049": false, "?25": true, "?7": true} {
		if err := waitFor(func() bool { return p.mode(mode) == want }); err != nil { // its last bytes may not be read yet
			p.t.Errorf("%s: mode %s is %v", how, mode, !want)
		}
	}
}
