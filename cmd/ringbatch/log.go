package main

import (
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strings"
	"sync/atomic"
	"time"
)

// logWriter writes the broker's log from a goroutine of its own: a reader that
// stops reading (a pipe that nobody empties, a terminal after Ctrl-S) stops the
// log, not the broker and everybody who waits for it. Lines that do not fit
// meanwhile are lost, and counted.
type logWriter struct {
	lines chan []byte // nil: the end
	lost  atomic.Int64
	ended chan struct{}
}

const (
	logLines   = 4096
	logWrite   = 64 << 10    // bytes written at once, about
	logFlushed = time.Second // how long the end waits for the reader
)

func newLogWriter(w io.Writer, lines int) *logWriter {
	l := &logWriter{lines: make(chan []byte, lines), ended: make(chan struct{})}
	go func() {
		defer close(l.ended)
		var text []byte
		for line := range l.lines {
			text = append(text, line...)
			if line != nil && len(l.lines) > 0 && len(text) < logWrite {
				continue // one write for many: otherwise formatting them is quicker
			}
			if n := l.lost.Swap(0); n > 0 {
				text = fmt.Appendf(text, "time=%s level=WARN msg=\"lines of the log were lost: it was not read quickly enough\" lines=%d\n",
					time.Now().Format("2006-01-02T15:04:05.000Z07:00"), n)
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
func (l *logWriter) Write(line []byte) (int, error) {
	select {
	case l.lines <- slices.Clone(line):
	default:
		l.lost.Add(1)
	}
	return len(line), nil
}

// end writes what is left, if somebody reads it.
func (l *logWriter) end() {
	over := time.After(logFlushed)
	select {
	case l.lines <- nil:
	case <-over:
		return
	}
	select {
	case <-l.ended:
	case <-over:
	}
}

// newLogger is the broker's log, to be ended.
func newLogger(level string, w io.Writer) (*slog.Logger, *logWriter, error) {
	var l slog.Level
	if err := l.UnmarshalText([]byte(strings.ToUpper(level))); err != nil {
		return nil, nil, fmt.Errorf("%w: --log_level is %q, must be debug, info, warn or error", errUsage, level)
	}
	writer := newLogWriter(w, logLines)
	return slog.New(slog.NewTextHandler(writer, &slog.HandlerOptions{Level: l})), writer, nil
}
