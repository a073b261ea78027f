// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"context"
	"log/slog"
	"maps"
	"strings"
	"sync"
	"time"
)

// quiet is a log handler that bounds the lines that peers can cause. It writes a message
// about the same user or model quietLines times in quietTime. The first line after that
// has the number of omitted lines. At level debug it writes all lines.
type quiet struct {
	slog.Handler
	state *quietState
	about string // the models that With has added
}

const (
	quietLines = 20
	quietTime  = 10 * time.Second
	quietKeys  = 1024 // the most kinds of lines at once
)

type quietState struct {
	mu    sync.Mutex
	kinds map[string]*quietKind
}

type quietKind struct {
	since         time.Time
	written, left int
}

func quietLogger(log *slog.Logger) *slog.Logger {
	if log.Enabled(context.Background(), slog.LevelDebug) {
		return log
	}
	return slog.New(&quiet{Handler: log.Handler(), state: &quietState{kinds: map[string]*quietKind{}}})
}

// Handle writes a line, or counts it.
func (q *quiet) Handle(ctx context.Context, r slog.Record) error {
	var key strings.Builder
	key.WriteString(r.Message)
	key.WriteString(q.about)
	r.Attrs(func(a slog.Attr) bool {
		if a.Key == "uid" || a.Key == "model" {
			key.WriteString(" " + a.Value.String())
		}
		return true
	})
	write, left := q.state.countLine(key.String(), r.Time)
	if !write {
		return nil
	}
	if left > 0 {
		r = r.Clone()
		r.AddAttrs(slog.Int("left_out_before", left))
	}
	return q.Handler.Handle(ctx, r)
}

func (s *quietState) countLine(key string, now time.Time) (write bool, left int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	k := s.kinds[key]
	if k == nil {
		if len(s.kinds) >= quietKeys {
			maps.DeleteFunc(s.kinds, func(_ string, k *quietKind) bool { return now.Sub(k.since) >= quietTime })
		}
		if len(s.kinds) >= quietKeys {
			clear(s.kinds)
		}
		k = &quietKind{since: now}
		s.kinds[key] = k
	}
	if now.Sub(k.since) >= quietTime {
		left = k.left
		*k = quietKind{since: now}
	}
	if k.written++; k.written > quietLines {
		k.left++
		return false, 0
	}
	return true, left
}

// WithAttrs makes the model part of a line's kind.
func (q *quiet) WithAttrs(attrs []slog.Attr) slog.Handler {
	about := q.about
	for _, a := range attrs {
		if a.Key == "model" {
			about += " " + a.Value.String()
		}
	}
	return &quiet{Handler: q.Handler.WithAttrs(attrs), state: q.state, about: about}
}
