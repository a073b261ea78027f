// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"fmt"
	"os"
	"sync"
)

// progress is one line on the terminal that says what is going on. Where
// standard error is not a terminal it stays silent.
type progress struct {
	mu    sync.Mutex
	out   *os.File
	dirty bool
}

func newProgress() *progress {
	p := &progress{}
	if st, err := os.Stderr.Stat(); err == nil && st.Mode()&os.ModeCharDevice != 0 {
		p.out = os.Stderr
	}
	return p
}

// line replaces the line.
func (p *progress) line(format string, a ...any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.out == nil {
		return
	}
	fmt.Fprintf(p.out, "\r\x1b[K"+format, a...)
	p.dirty = true
}

// clear takes it away, before something is printed.
func (p *progress) clear() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.dirty {
		fmt.Fprint(p.out, "\r\x1b[K")
		p.dirty = false
	}
}
