// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"strconv"
	"time"
)

// session is one HTTP/1.1 connection without TLS. It reads the requests that
// matter, plain inference, by itself: with as few system calls, goroutines and
// copies as there can be. Everything else of the protocol it reads with
// net/http; and what is out of the ordinary (compression, upgrades, other
// handlers) it leaves, with the connection, to an http.Server.
//
//  1. await the first byte of a request
//  2. find the end of its head; parse it if it is simple
//  3. read the body into a slot, run, write the answer
type session struct {
	door httpDoor
	conn *conn
	in   *bufio.Reader
	ctx  context.Context // ends when the caller hangs up
	body sessionBody
	out  []byte
	last bool // the answer says that the connection ends
}

const startTLS = 22 // the first byte of a TLS handshake, and of no HTTP request

const headBytes = 4 << 10 // of a head that is simple, and of what is read ahead

var errGivenAway = errors.New("the connection is another's now")

// serve answers requests until the connection ends or is another's.
func (s *session) serve() {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	s.ctx = context.WithValue(ctx, connKey{}, s.conn)
	s.conn.hungUp.Store(&cancel)
	s.in = bufio.NewReaderSize(s.conn, headBytes)
	s.body.in = s.in
	for {
		if _, err := s.in.Peek(1); err != nil || !s.conn.begin() {
			s.conn.Close()
			return
		}
		err := s.guarded()
		if errors.Is(err, errGivenAway) { // and so is the watch over it
			return
		}
		s.conn.calm()
		if err != nil || s.last || s.door.g.draining.Load() == refusing {
			s.conn.linger()
			return
		}
		s.conn.end()
	}
}

// guarded is request; a fault in it ends this session, not the gateway.
func (s *session) guarded() (err error) {
	defer func() {
		if fault := recover(); fault != nil {
			s.door.g.logFault(fault)
			if err = errLast; s.conn.answerUntil.Load() == 0 { // nothing was answered yet
				err = s.answerError(errFault, true)
			}
		}
	}()
	return s.request()
}

// request answers one. An error ends the connection.
func (s *session) request() error {
	now := time.Now()
	s.conn.beginBody(now) // a head has to come in time, too
	if first, _ := s.in.Peek(1); len(first) > 0 && first[0] == startTLS {
		return s.answerError(badRequest("this door speaks HTTP without TLS"), true)
	}
	text, err := s.head()
	if err != nil {
		return err
	}
	var h simpleHead
	if text != nil && h.parse(text) {
		_, _ = s.in.Discard(len(text))
		return s.infer(&h)
	}
	if text == nil || !isPlain(text) {
		return s.giveAway()
	}
	r, err := http.ReadRequest(s.in)
	if err != nil {
		return s.answerError(badRequest("HTTP: %v", err), true)
	}
	if r.Host == "" { // net/http's server asks for it, too
		return s.answerError(badRequest("HTTP: no header Host"), true)
	}
	return s.ask(r)
}

// head waits for a whole head and gives it, without taking it; nil if it is
// too long to be simple, or has an empty line that a bare LF begins, which
// net/http takes for its end.
func (s *session) head() ([]byte, error) {
	for from := 0; ; {
		b, _ := s.in.Peek(s.in.Buffered())
		end := bytes.Index(b[from:], headEnd)
		if bare := bytes.Index(b[from:], bareEnd); bare >= 0 && (end < 0 || bare < end) {
			return nil, nil
		}
		if end >= 0 {
			return b[:from+end+len(headEnd)], nil
		}
		if from = max(0, len(b)-len(headEnd)); len(b) == headBytes {
			return nil, nil
		}
		if _, err := s.in.Peek(len(b) + 1); err != nil {
			if isTimeout(err) {
				return nil, s.answerError(errSlowBody, true)
			}
			return nil, err
		}
	}
}

// A head ends with an empty line. Where the line before it ends with a bare LF
// the head is found here too, and refused by parse.
var headEnd, bareEnd = []byte("\n\r\n"), []byte("\n\n")

// giveAway hands the connection, with what was read ahead, to the http.Server. It
// is watched on until its head is whole: see followState.
func (s *session) giveAway() error {
	ahead, _ := s.in.Peek(s.in.Buffered())
	cancel := s.conn.hungUp.Swap(nil)
	s.conn.noLength.Store(true)
	if !s.conn.http.give(&givenConn{conn: s.conn, ahead: bytes.Clone(ahead)}) {
		s.conn.hungUp.Store(cancel)
		return s.answerError(errDraining, true)
	}
	return errGivenAway
}

// ask answers what is not inference: little, and not often.
func (s *session) ask(r *http.Request) error {
	r = r.WithContext(s.ctx)
	r.RemoteAddr = s.conn.peer.remote.String()
	w := &collected{header: http.Header{}, status: http.StatusOK}
	if r.ContentLength == 0 {
		s.conn.endBody() // it is whole
	}
	s.door.ServeHTTP(w, r)
	left, err := io.CopyN(io.Discard, r.Body, maxSmallBody)
	last := r.Close || err == nil && left == maxSmallBody || err != nil && err != io.EOF
	b := append(s.out[:0], "HTTP/1.1 "...)
	b = strconv.AppendInt(b, int64(w.status), 10)
	b = append(append(append(b, ' '), http.StatusText(w.status)...), "\r\n"...)
	w.header.Set("Content-Length", strconv.Itoa(w.body.Len()))
	var lines bytes.Buffer
	_ = w.header.Write(&lines)
	b = s.appendEnd(append(b, lines.Bytes()...), last)
	s.out = append(b, w.body.Bytes()...)
	return s.write(last)
}

// collected is an answer before it is sent.
type collected struct {
	header http.Header
	status int
	body   bytes.Buffer
}

func (w *collected) Header() http.Header         { return w.header }
func (w *collected) WriteHeader(status int)      { w.status = status }
func (w *collected) Write(p []byte) (int, error) { return w.body.Write(p) }

// appendEnd writes the last lines of an answer's head. While the gateway drains,
// callers are asked to go elsewhere with their next request.
func (s *session) appendEnd(b []byte, last bool) []byte {
	b = append(append(b, "Date: "...), *s.door.g.date.Load()...)
	if s.last = last || s.door.g.draining.Load() != notDraining; s.last {
		b = append(b, "\r\nConnection: close"...)
	}
	return append(b, "\r\n\r\n"...)
}

var errLast = errors.New("that was the last answer")

// write sends what is in out.
func (s *session) write(last bool) error {
	s.conn.endBody()
	s.conn.beginAnswer(time.Now(), len(s.out))
	_, err := s.conn.Write(s.out)
	if err == nil && last {
		err = errLast
	}
	return err
}

// answerError says an error. What is left of the body is read, if that is
// little; otherwise the connection ends.
func (s *session) answerError(err error, last bool) error {
	if s.body.left != 0 && !last {
		s.conn.beginBody(time.Now()) // perhaps again: it comes in time, too, or the connection ends
		last = !s.body.discard(smallBuffer)
	}
	m := meaningOf(err)
	b := append(s.out[:0], "HTTP/1.1 "...)
	b = strconv.AppendInt(b, int64(m.http), 10)
	b = append(append(append(b, ' '), http.StatusText(m.http)...), "\r\nContent-Type: application/json\r\n"...)
	switch m.http {
	case http.StatusTooManyRequests, http.StatusServiceUnavailable:
		b = append(b, "Retry-After: 1\r\n"...)
	case http.StatusUnauthorized:
		b = append(b, "WWW-Authenticate: Bearer\r\n"...)
	case http.StatusRequestTimeout:
		last = true
	}
	text := append(appendString([]byte(`{"error":`), textOf(err)), '}')
	b = append(strconv.AppendInt(append(b, "Content-Length: "...), int64(len(text)), 10), "\r\n"...)
	s.out = append(s.appendEnd(b, last), text...)
	return s.write(last)
}

// infer answers a plain inference request.
func (s *session) infer(h *simpleHead) error {
	s.body.begin(h)
	s.endWholeBody()
	who, err := s.door.g.identify(s.conn, string(h.authorization), nil)
	if err == nil {
		if err = s.door.g.begin(who); err == nil {
			err = s.run(h, who)
		}
	}
	var failed *net.OpError
	if err != nil && !errors.As(err, &failed) { // not a write that failed
		return s.answerError(err, false)
	}
	return err
}

// endWholeBody ends the watch over a body of which nothing is to come any more:
// what the request waits for from here on is not its caller.
func (s *session) endWholeBody() {
	if left := s.body.left; left >= 0 && left <= int64(s.in.Buffered()) {
		s.conn.endBody()
	}
}

// run does an inference that has begun, and ends it.
func (s *session) run(h *simpleHead, who *caller) error {
	g := s.door.g
	defer g.end(who)
	k, as, err := g.models.named(s.ctx, h.model, h.version)
	if err != nil {
		return err
	}
	b := bodies.Get().(*body)
	defer b.done()
	c := newCall()
	defer c.done()
	c.model, c.as, c.caller = k, as, who
	err = s.runCall(h, c, b)
	c.count(err)
	return err
}

func (s *session) runCall(h *simpleHead, c *call, b *body) error {
	if err := c.admitBody(h.length); err != nil {
		return err
	}
	if err := b.open(c, &s.body, h.length, ""); err != nil {
		return err
	}
	defer b.close()
	if err := b.read(c, h.headerLength); err != nil {
		return err
	}
	if err := c.check(); err != nil {
		return err
	}
	c.watch, c.onFilled = &s.conn.watch, s.conn.bodyRead
	s.endWholeBody()
	if err := s.awaitBody(); err != nil {
		return err
	}
	if err := c.run(s.ctx); err != nil {
		return err
	}
	if err := c.writeRegions(); err != nil {
		return err
	}
	return s.answer(c, b)
}

// answer sends what came out: small tensors in one piece with the head, large
// ones from their slots.
func (s *session) answer(c *call, b *body) error {
	if n := c.mostJSONBytes(); n > smallBuffer {
		if err := c.take(n); err != nil {
			return err
		}
	}
	text, binary := c.appendAnswer(b.text[:0])
	b.text = text
	out := append(s.out[:0], "HTTP/1.1 200 OK\r\nContent-Type: "...)
	if binary > 0 {
		out = append(out, "application/octet-stream\r\n"+headerLength+": "...)
		out = append(strconv.AppendInt(out, int64(len(text)), 10), "\r\nContent-Length: "...)
	} else {
		out = append(out, "application/json\r\nContent-Length: "...)
	}
	out = append(strconv.AppendInt(out, int64(len(text)+binary), 10), "\r\n"...)
	out = s.appendEnd(out, s.body.left != 0)
	s.conn.beginAnswer(c.ended, len(text)+binary)
	if len(text) <= smallBuffer && binary <= smallAnswer {
		out = append(out, text...)
		c.eachBinary(func(p []byte) { out = append(out, p...) })
		s.out = out
		_, err := s.conn.Write(out)
		return err
	}
	s.out = out
	parts := net.Buffers{out, text}
	c.eachBinary(func(p []byte) { parts = append(parts, p) })
	_, err := parts.WriteTo(s.conn.Conn) // one system call for all of them
	return err
}

// eachBinary gives the tensors that follow the JSON.
func (c *call) eachBinary(each func(p []byte)) {
	for i := range c.outputs {
		if o := &c.outputs[i]; o.region.region == nil && c.isBinary(o) {
			for _, p := range o.parts {
				each(p)
			}
		}
	}
}

// writeRegions puts those outputs into shared memory that are wanted there.
func (c *call) writeRegions() error {
	for i := range c.outputs {
		if o := &c.outputs[i]; o.region.region != nil {
			if err := o.write(); err != nil {
				return err
			}
		}
	}
	return nil
}
