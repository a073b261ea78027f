// SPDX-License-Identifier: Apache-2.0

// Package logging writes the logs of commands.
package logging

import (
	"bytes"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// Format is the level and format of a log.
type Format struct {
	level slog.Level
	json  bool
}

// NewFormat reads a level (debug, info, warn or error) and a format (text or json).
func NewFormat(level, format string) (*Format, error) {
	f := &Format{json: format == "json"}
	if err := f.level.UnmarshalText([]byte(strings.ToUpper(level))); err != nil {
		return nil, fmt.Errorf("level is %q, must be debug, info, warn or error", level)
	}
	if !f.json && format != "text" {
		return nil, fmt.Errorf("format is %q, must be text or json", format)
	}
	return f, nil
}

// Open makes a log that writes to w; on a terminal, text is short. The caller ends the
// writer.
func (f *Format) Open(w io.Writer) (*slog.Logger, *Writer) {
	terminal := false
	if file, ok := w.(*os.File); ok {
		_, err := unix.IoctlGetTermios(int(file.Fd()), unix.TCGETS)
		terminal = err == nil
	}
	log := func(w io.Writer) *slog.Logger {
		switch o := (slog.HandlerOptions{Level: f.level}); {
		case f.json:
			return slog.New(slog.NewJSONHandler(w, &o))
		case terminal:
			return slog.New(&Terminal{w: w, level: f.level})
		default:
			return slog.New(slog.NewTextHandler(w, &o))
		}
	}
	writer := newWriter(w, logLines, func(n int64) string {
		var line bytes.Buffer
		log(&line).Warn("lines of the log were lost: it was not read quickly enough", "lines", n)
		return line.String()
	})
	return log(writer), writer
}
