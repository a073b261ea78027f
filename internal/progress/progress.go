// SPDX-License-Identifier: Apache-2.0

// Package progress is for commands that take minutes: one line on the terminal
// that says what is going on, and output files that are known to be writable
// before it begins.
package progress

import (
	"errors"
	"fmt"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// ErrInterrupted ends work that its user has interrupted.
var ErrInterrupted = errors.New("interrupted")

// Line is that line. Where standard error is not a terminal it stays silent.
type Line struct {
	mu    sync.Mutex
	out   *os.File
	dirty bool
}

// New takes standard error, if it is a terminal.
func New() *Line {
	p := &Line{}
	if _, err := unix.IoctlGetTermios(int(os.Stderr.Fd()), unix.TCGETS); err == nil {
		p.out = os.Stderr
	}
	return p
}

// Say replaces the line.
func (p *Line) Say(format string, a ...any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.out == nil {
		return
	}
	width := 0
	if size, err := unix.IoctlGetWinsize(int(p.out.Fd()), unix.TIOCGWINSZ); err == nil {
		width = int(size.Col)
	}
	fmt.Fprint(p.out, "\r\x1b[K"+fit(fmt.Sprintf(format, a...), width))
	p.dirty = true
}

// fit cuts a text to one line of a terminal. One that is wrapped could not be
// replaced, and would be followed by the next. A width of 0 is not known.
func fit(text string, width int) string {
	if letters := []rune(text); width > 0 && len(letters) >= width { // the last column is the cursor's
		return string(letters[:max(0, width-2)]) + "…"
	}
	return text
}

// Clear takes it away, before something is printed.
func (p *Line) Clear() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.dirty {
		fmt.Fprint(p.out, "\r\x1b[K")
		p.dirty = false
	}
}
