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
	logFlushed = time.Second // how long the end waits for the reader
)

func newLogWriter(w io.Writer, lines int) *logWriter {
	l := &logWriter{lines: make(chan []byte, lines), ended: make(chan struct{})}
	go func() {
		defer close(l.ended)
		for line := range l.lines {
			if n := l.lost.Swap(0); n > 0 {
				_, _ = fmt.Fprintf(w, "level=WARN msg=\"lines of the log were lost: nobody read it for a while\" lines=%d\n", n)
			}
			if line == nil {
				return
			}
			_, _ = w.Write(line)
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
