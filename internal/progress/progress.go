// SPDX-License-Identifier: Apache-2.0

// Package progress is for commands that take minutes: one line on the terminal
// that says what is going on, and output files that are known to be writable
// before it begins.
package progress

import (
	"fmt"
	"os"
	"sync"
)

// Line is that line. Where standard error is not a terminal it stays silent.
type Line struct {
	mu    sync.Mutex
	out   *os.File
	dirty bool
}

// New takes standard error, if it is a terminal.
func New() *Line {
	p := &Line{}
	if st, err := os.Stderr.Stat(); err == nil && st.Mode()&os.ModeCharDevice != 0 {
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
	fmt.Fprintf(p.out, "\r\x1b[K"+format, a...)
	p.dirty = true
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
