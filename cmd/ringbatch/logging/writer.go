// SPDX-License-Identifier: Apache-2.0

package logging

import (
	"io"
	"slices"
	"sync/atomic"
	"time"
)

// Writer writes the broker's log from a separate goroutine. If the reader of the log stops
// (a full pipe, a terminal after Ctrl-S), the broker goes on. Writer drops and counts
// lines that do not fit into its buffer.
type Writer struct {
	lines chan []byte // nil: the end
	lost  atomic.Int64
	ended chan struct{}
}

const (
	logLines = 4096
	logWrite = 64 << 10 // bytes written at once, about

	// End waits for the reader in naps, so that a machine that stands still for a second
	// does not look like a reader that has stopped.
	logNaps = 20
	logNap  = 50 * time.Millisecond
)

func newWriter(w io.Writer, lines int, lostLines func(n int64) string) *Writer {
	l := &Writer{lines: make(chan []byte, lines), ended: make(chan struct{})}
	go func() {
		defer close(l.ended)
		var text []byte
		for line := range l.lines {
			text = append(text, line...)
			if line != nil && len(l.lines) > 0 && len(text) < logWrite {
				continue // one write for many lines: a write per line is slower than the formatting
			}
			if n := l.lost.Swap(0); n > 0 {
				text = append(text, lostLines(n)...)
			}
			_, _ = w.Write(text)
			if text = text[:0]; line == nil {
				return
			}
		}
	}()
	return l
}

// Write takes one line. It never blocks.
func (l *Writer) Write(line []byte) (int, error) {
	select {
	case l.lines <- slices.Clone(line):
	default:
		l.lost.Add(1)
	}
	return len(line), nil
}

// End writes the remaining lines, unless the reader has stopped.
func (l *Writer) End() {
	lines := l.lines
	for range logNaps {
		select {
		case lines <- nil:
			lines = nil // sent once
		case <-l.ended:
			return
		case <-time.After(logNap):
		}
	}
}
