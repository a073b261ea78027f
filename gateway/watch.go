// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"context"
	"io"
	"net/http"
	"sync"
	"sync/atomic"
	"time"
)

// watch notices a caller that is slow with sending a body or with reading an
// answer, without a timer per request. An HTTP/1 connection has one, since it has
// one request at a time; each request of HTTP/2 has one of its own.
type watch struct {
	g *Gateway
	// Moments of awake's; 0 is none.

	// Of the body that is being read: since when, and what has come.
	bodySince, bodyGot atomic.Int64
	bodyRead           func() // endBody
	// Of the answer that is being written: until when it has to be.
	answerUntil atomic.Int64
}

func (w *watch) init(g *Gateway) { w.g, w.bodyRead = g, w.endBody }

// beginBody and endBody stand around the reading of a body.
func (w *watch) beginBody(now time.Time) {
	w.bodyGot.Store(0)
	w.bodySince.Store(w.g.awake.at(now))
}

func (w *watch) endBody() { w.bodySince.Store(0) }

// pauseBody stops the body's clock while it is not the caller who keeps us
// waiting; meanwhile it may hang up.
func (w *watch) pauseBody() (resume func()) {
	since, paused := w.bodySince.Swap(0), w.g.awake.now()
	return func() {
		if since != 0 {
			w.bodySince.Store(since + w.g.awake.now() - paused)
		}
	}
}

// beginAnswer and endAnswer stand around the writing of an answer.
func (w *watch) beginAnswer(now time.Time, size int) {
	w.answerUntil.Store(w.g.awake.at(now) + int64(w.g.answerTime(size)))
}

func (w *watch) endAnswer() { w.answerUntil.Store(0) }

// answerTime is how long a caller may take to read an answer: it keeps slots
// of the ring for that long.
func (g *Gateway) answerTime(size int) time.Duration {
	return g.cfg.pace.answer + time.Duration(size)*time.Second/time.Duration(g.cfg.pace.rate)
}

// slowBody tells whether too little of the body has come. Unread is asked for
// what has come and was not read yet.
func (w *watch) slowBody(now int64, unread func() int64) bool {
	since := w.bodySince.Load()
	if since == 0 {
		return false
	}
	return w.g.cfg.pace.slow(now-since, w.bodyGot.Load(), unread)
}

// slow tells whether too little has come in the time that it took.
func (p *pace) slow(took, got int64, unread func() int64) bool {
	late := time.Duration(took) - p.body
	enough := func(got int64) bool {
		return late <= time.Duration(got)*time.Second/time.Duration(p.rate)
	}
	return !enough(got) && !enough(got+unread())
}

// slowAnswer tells whether an answer should have been read by now.
func (w *watch) slowAnswer(now int64) bool {
	until := w.answerUntil.Load()
	return until != 0 && now > until
}

// past is a deadline that every read and write has missed.
var past = time.Unix(1, 0)

// stream is the watch of one HTTP/2 request.
type stream struct {
	watch
	conn    *conn
	control *http.ResponseController

	mu    sync.Mutex
	ended bool // the handler has returned, control must not be used any more
}

func (l *listener) watchStream(w http.ResponseWriter, c *conn) *stream {
	s := &stream{conn: c, control: http.NewResponseController(w)}
	s.init(l.g)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.streams[s] = struct{}{}
	if c.streams == nil {
		c.streams = map[*stream]struct{}{}
	}
	c.streams[s] = struct{}{}
	return s
}

func (l *listener) forgetStream(s *stream) {
	l.mu.Lock()
	delete(l.streams, s)
	delete(s.conn.streams, s)
	l.mu.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended = true
}

// sweep ends the request if it takes too long; the connection's others go on.
func (s *stream) sweep(now int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended {
		return
	}
	if s.slowAnswer(now) {
		s.g.log.Warn("a caller does not read its answer, given up", "address", s.conn.peer.remote)
		_ = s.control.SetWriteDeadline(past)
	}
	if s.slowBody(now, func() int64 { return 0 }) {
		_ = s.control.SetReadDeadline(past) // the handler finds out, and answers
	}
}

// cutBody ends the reading of the body; the handler finds out, and answers.
func (s *stream) cutBody() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.ended {
		_ = s.control.SetReadDeadline(past)
	}
}

// cutAnswer ends the writing of the answer.
func (s *stream) cutAnswer() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.ended {
		_ = s.control.SetWriteDeadline(past)
	}
}

// watchedBody is a body of net/http that is watched until its end.
type watchedBody struct {
	io.ReadCloser
	watch *watch
	count bool // the connection does not
	ended bool
}

func (b *watchedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if b.count {
		b.watch.bodyGot.Add(int64(n))
	}
	if err != nil {
		b.ended = true
		b.watch.endBody()
	}
	return n, err
}

// pauseBodyOf is pauseBody of the request that the context is of, if that came by HTTP.
func pauseBodyOf(ctx context.Context) (resume func()) {
	if connOf(ctx) == nil {
		return func() {}
	}
	return watchOf(ctx).pauseBody()
}

type watchKey struct{}

// watchOf is what watches over a request.
func watchOf(ctx context.Context) *watch {
	if s, ok := ctx.Value(watchKey{}).(*stream); ok {
		return &s.watch
	}
	return &connOf(ctx).watch
}
