// SPDX-License-Identifier: Apache-2.0

package supervise

import (
	"bufio"
	"context"
	"io"
	"log/slog"
	"regexp"
	"strings"
)

// The output of processes, in the broker's log.

// Said names the process in a record of its output. A handler for terminals prints such
// a record as the process wrote it, behind this name.
type Said string

const (
	maxLogLine = 4096 // bytes; longer lines are split
	maxTrace   = 200  // lines of a traceback in one record
	lastLines  = 10   // of the output, in the warning about an unexpected end
	lastBytes  = 2000 // of these lines
)

type output struct {
	log   *slog.Logger
	name  string
	trace []string // the traceback so far
	last  []string // lines that are neither warnings nor errors
}

// logLines logs the process's output: each line at its level, a Python traceback as one
// record. It returns the last lines below the level of a warning.
func (p *process) logLines(from io.Reader) string {
	o := &output{log: p.s.log, name: p.name}
	r := bufio.NewReaderSize(from, maxLogLine)
	for {
		text, _, err := r.ReadLine() // the rest of a longer line comes as the next
		if err != nil {
			o.logTrace()
			last := strings.Join(o.last, "\n")
			return last[max(0, len(last)-lastBytes):]
		}
		line := string(text)
		if strings.Contains(line, mpsNotReady) {
			p.refused.Store(true)
		}
		o.addLine(line)
	}
}

func (o *output) addLine(line string) {
	level := levelOf(line)
	switch {
	case len(o.trace) > 0: // indented lines, then the exception
		if o.trace = append(o.trace, line); !strings.HasPrefix(line, " ") || len(o.trace) == maxTrace {
			o.logTrace()
		}
	case strings.HasPrefix(line, "Traceback (most recent call last)"):
		o.trace = append(o.trace, line)
	default:
		o.write(level, line)
		if level == slog.LevelInfo {
			o.last = append(o.last[max(0, len(o.last)-lastLines+1):], line)
		}
	}
}

func (o *output) logTrace() {
	if len(o.trace) > 0 {
		o.write(slog.LevelError, strings.Join(o.trace, "\n"))
	}
	o.trace = nil
}

func (o *output) write(level slog.Level, text string) {
	o.log.Log(context.Background(), level, text, "worker", Said(o.name))
}

// leveled matches lines of Python's logging and of slog.
var leveled = regexp.MustCompile(`^(?:\S+ ){0,3}(?:level=)?(WARN|ERROR|CRITICAL|FATAL)`)

func levelOf(line string) slog.Level {
	switch found := leveled.FindStringSubmatch(line); {
	case found == nil:
		return slog.LevelInfo
	case found[1] == "WARN":
		return slog.LevelWarn
	}
	return slog.LevelError
}
