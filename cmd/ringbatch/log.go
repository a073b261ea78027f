// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"log/slog"

	"github.com/ringbatch/ringbatch/cmd/ringbatch/logging"
)

// logFlags choose the level and format of a log.
type logFlags struct{ level, format string }

func addLogFlags(f *flagSet) *logFlags {
	l := &logFlags{}
	f.StringVar(&l.level, "log-level", "info", "debug, info, warn or error")
	f.StringVar(&l.format, "log-format", "text", "text (short on a terminal) or json, one object per line")
	return l
}

// open makes the log. The caller ends the writer.
func (l *logFlags) open(w io.Writer) (*slog.Logger, *logging.Writer, error) {
	handler, err := l.handler()
	if err != nil {
		return nil, nil, err
	}
	log, writer := handler.Open(w)
	return log, writer, nil
}

func (l *logFlags) handler() (*logging.Format, error) {
	f, err := logging.NewFormat(l.level, l.format)
	if err != nil {
		return nil, fmt.Errorf("%w: --log-%w", errUsage, err)
	}
	return f, nil
}
