// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"context"
	"log/slog"
	"strings"
	"sync"
	"time"
)

// quiet is a log handler that lets peers say only so much: a line that comes
// again and again, for the same user or model, is written quietLines times in
// quietTime, and after that time once more with how many were left out. At
// level debug everything is written.
type quiet struct {
	slog.Handler
	state *quietState
	about string // what With has added that tells one subject from another
}

const (
	quietLines = 20
	quietTime  = 10 * time.Second
	quietKeys  = 1024 // kinds of lines that are told apart at once
)

type quietState struct {
	mu    sync.Mutex
	kinds map[string]*quietKind
}

type quietKind struct {
	since         time.Time
	written, left int
}

// quietly wraps a logger.
func quietly(log *slog.Logger) *slog.Logger {
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
	write, left := q.state.count(key.String(), r.Time)
	if !write {
		return nil
	}
	if left > 0 {
		r = r.Clone()
		r.AddAttrs(slog.Int("left_out_before", left))
	}
	return q.Handler.Handle(ctx, r)
}

// count says whether a line of that kind is written now, and how many were left
// out before it.
func (s *quietState) count(key string, now time.Time) (write bool, left int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	k := s.kinds[key]
	if k == nil {
		if len(s.kinds) >= quietKeys {
			s.forget(now)
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

// forget makes room: the kinds whose time is over, or all of them.
func (s *quietState) forget(now time.Time) {
	for key, k := range s.kinds {
		if now.Sub(k.since) >= quietTime {
			delete(s.kinds, key)
		}
	}
	if len(s.kinds) >= quietKeys {
		clear(s.kinds)
	}
}

// WithAttrs keeps the model apart.
func (q *quiet) WithAttrs(attrs []slog.Attr) slog.Handler {
	about := q.about
	for _, a := range attrs {
		if a.Key == "model" {
			about += " " + a.Value.String()
		}
	}
	return &quiet{Handler: q.Handler.WithAttrs(attrs), state: q.state, about: about}
}

// WithGroup is here for the interface; the broker uses none.
func (q *quiet) WithGroup(name string) slog.Handler {
	return &quiet{Handler: q.Handler.WithGroup(name), state: q.state, about: q.about}
}
