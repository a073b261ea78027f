// SPDX-License-Identifier: Apache-2.0

package logging

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strings"

	"github.com/ringbatch/ringbatch/broker/supervise"
	"github.com/ringbatch/ringbatch/internal/printable"
)

// Terminal is a handler for logs on terminals: the time of day, the level of warnings and
// errors, the message, and few attributes. It keeps the output of worker processes as it is:
//
//	12:30:01 worker attached model=double worker=double-0
//	double-0 | Traceback (most recent call last):
type Terminal struct {
	w     io.Writer
	level slog.Level
	attrs []slog.Attr
}

// maxShown is the length at which a line is cut.
const maxShown = 16 << 10

// hiddenKeys are attributes that terminals do not show.
var hiddenKeys = []string{"epoch", "loops", "id", "command", "bytes", "slots"}

// Enabled is true for records at the log's level or above.
func (t *Terminal) Enabled(_ context.Context, level slog.Level) bool { return level >= t.level }

// WithAttrs adds attributes to every record.
func (t *Terminal) WithAttrs(attrs []slog.Attr) slog.Handler {
	return &Terminal{t.w, t.level, append(slices.Clip(t.attrs), attrs...)}
}

// WithGroup leaves the attributes in one group.
func (t *Terminal) WithGroup(string) slog.Handler { return t }

// Handle writes one record.
func (t *Terminal) Handle(ctx context.Context, r slog.Record) error {
	text := strings.Builder{}
	text.WriteString(r.Time.Format("15:04:05 "))
	if r.Level >= slog.LevelWarn {
		text.WriteString(r.Level.String() + " ")
	}
	text.WriteString(r.Message)
	var said, output string
	write := func(a slog.Attr) bool {
		name, isOutput := a.Value.Any().(supervise.Said)
		switch value := a.Value.String(); {
		case isOutput && a.Key == "worker":
			said = prefixed(string(name), r.Message)
		case isOutput && name != "" && !t.Enabled(ctx, slog.LevelInfo): // else its lines were logged
			output = "\n" + prefixed("  ", string(name))
		case isOutput || slices.Contains(hiddenKeys, a.Key) || value == "" || value == "false":
		case strings.ContainsAny(value, " \t\n\""):
			fmt.Fprintf(&text, " %s=%q", a.Key, value)
		default:
			fmt.Fprintf(&text, " %s=%s", a.Key, value)
		}
		return true
	}
	for _, a := range t.attrs {
		write(a)
	}
	r.Attrs(write)
	if said != "" {
		_, err := io.WriteString(t.w, said+"\n")
		return err
	}
	_, err := io.WriteString(t.w, printable.Text(text.String(), maxShown)+output+"\n")
	return err
}

// prefixed puts a name before every line.
func prefixed(name, lines string) string {
	list := strings.Split(strings.ReplaceAll(lines, "\t", "    "), "\n")
	for i, line := range list {
		list[i] = name + " | " + printable.Text(line, maxShown)
	}
	return strings.Join(list, "\n")
}
