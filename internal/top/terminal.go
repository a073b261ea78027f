// SPDX-License-Identifier: Apache-2.0

package top

import (
	"errors"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// terminal is the one that the program was started in.
type terminal struct {
	in, out *os.File
	before  unix.Termios // how it was
	shown   []string     // the lines that it shows
}

// ErrNoTerminal is the answer to a pipe or a file.
var ErrNoTerminal = errors.New("top needs a terminal; elsewhere use `ringbatch stats --watch 1s` or `ringbatch stats --json`")

func openTerminal(in, out *os.File) (*terminal, error) {
	t := &terminal{in: in, out: out}
	for _, f := range []*os.File{in, out} {
		now, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
		if err != nil {
			return nil, ErrNoTerminal
		}
		t.before = *now
	}
	if term := os.Getenv("TERM"); term == "" || term == "dumb" {
		return nil, ErrNoTerminal
	}
	return t, nil
}

const (
	otherScreen = "\x1b[?1049h" + "\x1b[?25l" + "\x1b[?7l" // without cursor, without wrapping
	firstScreen = "\x1b[0m" + "\x1b[?7h" + "\x1b[?25h" + "\x1b[?1049l"
	clearScreen = "\x1b[2J"
)

// enter takes the terminal: each key comes at once and unseen, and what was on
// the screen is kept aside.
func (t *terminal) enter() error {
	raw := t.before
	raw.Iflag &^= unix.BRKINT | unix.ICRNL | unix.INPCK | unix.ISTRIP | unix.IXON
	raw.Lflag &^= unix.ECHO | unix.ICANON | unix.IEXTEN | unix.ISIG
	raw.Cc[unix.VMIN], raw.Cc[unix.VTIME] = 1, 0
	if err := unix.IoctlSetTermios(int(t.out.Fd()), unix.TCSETSW, &raw); err != nil {
		return err
	}
	t.forget()
	_, err := t.out.WriteString(otherScreen + clearScreen)
	return err
}

// leave gives the terminal back as it was. Keys that were not read are dropped:
// they were meant for this program, not for the shell.
func (t *terminal) leave() {
	_, _ = t.out.WriteString(firstScreen)
	_ = unix.IoctlSetTermios(int(t.out.Fd()), unix.TCSETSF, &t.before)
}

// size is that of the screen. Some terminals do not tell it.
func (t *terminal) size() (width, height int) {
	s, err := unix.IoctlGetWinsize(int(t.out.Fd()), unix.TIOCGWINSZ)
	if err != nil || s.Col == 0 || s.Row == 0 {
		return 80, 24
	}
	return int(s.Col), int(s.Row)
}

// forget has the next show write everything.
func (t *terminal) forget() { t.shown = nil }

// show writes the lines that have changed, in one piece.
func (t *terminal) show(lines []string) error {
	var b strings.Builder
	if len(lines) != len(t.shown) {
		b.WriteString(clearScreen)
		t.shown = make([]string, len(lines))
	}
	for i, line := range lines {
		if line != t.shown[i] {
			b.WriteString("\x1b[" + strconv.Itoa(i+1) + ";1H\x1b[K" + line) // erased first: after a full line the cursor is on its last character
		}
	}
	t.shown = lines
	if b.Len() == 0 {
		return nil
	}
	_, err := t.out.WriteString(b.String())
	return err
}
