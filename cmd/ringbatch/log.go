// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
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
	logLines = 4096
	logWrite = 64 << 10 // bytes written at once, about

	// How long the end waits for the reader: in naps, so that a machine that stood
	// still for a second is not taken for a reader that does not read.
	logNaps = 20
	logNap  = 50 * time.Millisecond
)

func newLogWriter(w io.Writer, lines int, lostLines func(n int64) string) *logWriter {
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
	lines := l.lines
	for range logNaps {
		select {
		case lines <- nil:
			lines = nil // said once
		case <-l.ended:
			return
		case <-time.After(logNap):
		}
	}
}

// logFlags say how a log is written.
type logFlags struct {
	level, format string
	terminal      bool // the log goes to one
}

func addLogFlags(f *flagSet) *logFlags {
	l := &logFlags{}
	f.StringVar(&l.level, "log-level", "info", "debug, info, warn or error")
	f.StringVar(&l.format, "log-format", "text", "text, which is short on a terminal, or json: one object a line")
	return l
}

// open makes the log, to be ended.
func (l *logFlags) open(w io.Writer) (*slog.Logger, *logWriter, error) {
	if f, ok := w.(*os.File); ok {
		_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
		l.terminal = err == nil
	}
	handler, err := l.handler()
	if err != nil {
		return nil, nil, err
	}
	writer := newLogWriter(w, logLines, func(n int64) string {
		var line bytes.Buffer
		slog.New(handler(&line)).Warn("lines of the log were lost: it was not read quickly enough", "lines", n)
		return line.String()
	})
	return slog.New(handler(writer)), writer, nil
}

// handler makes one that writes lines to w.
func (l *logFlags) handler() (func(w io.Writer) slog.Handler, error) {
	var o slog.HandlerOptions
	var level slog.Level
	if err := level.UnmarshalText([]byte(strings.ToUpper(l.level))); err != nil {
		return nil, fmt.Errorf("%w: --log-level is %q, must be debug, info, warn or error", errUsage, l.level)
	}
	o.Level = level
	switch l.format {
	case "text":
		if l.terminal {
			return func(w io.Writer) slog.Handler { return &terminalLog{w: w, level: level} }, nil
		}
		return func(w io.Writer) slog.Handler { return slog.NewTextHandler(w, &o) }, nil
	case "json":
		return func(w io.Writer) slog.Handler { return slog.NewJSONHandler(w, &o) }, nil
	}
	return nil, fmt.Errorf("%w: --log-format is %q, must be text or json", errUsage, l.format)
}
