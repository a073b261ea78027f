// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"net"
	"net/http"
	"net/netip"
	"sync"
	"sync/atomic"
)

// A connection is idle while nothing is under way on it: no request that has
// begun to come, no gRPC call, no answer that is being sent. The first to change
// that has it: a request that begins, or one who takes its place. Nobody takes the
// place of a caller that has just been answered: its next request is on the way.
// A gRPC stream is under way while it has a request to answer; between two it keeps
// its connection for longer than others keep theirs, as its caller would notice.

// retired is far below what requests add to it.
const retired = -1 << 30

// begin counts something that is under way; false if the connection is retired.
func (c *conn) begin() bool { return c.underWay.Add(1) > 0 }

func (c *conn) end() {
	c.served.Store(true)
	c.moved()
	c.callEnded.Store(c.idleSince.Load())
	c.underWay.Add(-1)
}

// beginReading counts an answer that is under way to a gRPC caller.
func (c *conn) beginReading() {
	c.underWay.Add(1)
	c.toRead.Add(1)
}

func (c *conn) endReading() {
	c.toRead.Add(-1)
	c.underWay.Add(-1)
}

// moved notes that something was read or written.
func (c *conn) moved() { c.idleSince.Store(c.l.g.awake.now()) }

func (c *conn) busy() bool { return c.underWay.Load() > 0 }

// retire takes an idle connection from its caller; the next is to close it.
func (c *conn) retire() bool { return c.underWay.CompareAndSwap(0, retired) }

// makeRoom ends a connection, of that origin only if one is given, for the sake
// of a newcomer: one that is idle, or else one that has stalled, or else one whose
// streams are idle. nil if there is none. The caller has l.mu, and closes it.
func (l *listener) makeRoom(of netip.Addr) *conn {
	if c := l.retireLongestIdle(of, false); c != nil {
		return c
	}
	if c := l.retireStalled(of); c != nil {
		return c
	}
	return l.retireLongestIdle(of, true)
}

// retireLongestIdle takes the connection that has been idle for longest, of those
// with open streams or of those without, and of these first that never asked for
// anything; nil if none is for long enough. It does not look for long where many
// turn out to have something unread.
func (l *listener) retireLongestIdle(of netip.Addr, streams bool) *conn {
	rest := l.g.cfg.pace.rest
	if streams {
		rest = l.g.cfg.pace.stream
	}
	for range 8 {
		now, ahead := l.g.awake.now(), false
		before := now - int64(rest)
		var first *conn
		for c := range l.conns {
			for _, moment := range []*atomic.Int64{c.idle(), &c.arrivals.lastData} {
				if since := moment.Load(); since > now { // the clock was put back since, after a standstill
					ahead = moment.CompareAndSwap(since, now) || ahead
				}
			}
			if c.isFrom(of) && c.underWay.Load() == 0 && (c.openStreams.Load() > 0) == streams && c.idle().Load() <= before && (first == nil || c.goesBefore(first)) && !c.gotMessage(before) {
				first = c
			}
		}
		switch {
		case first == nil && ahead: // looks again
		case first == nil:
			return nil
		case first.unread() > 0: // a request that is not read yet
			first.idle().Store(now)
		case first.gotMessage(before): // it was read meanwhile
		case first.retire():
			return first
		}
	}
	return nil
}

// retireStalled takes a connection whose request has begun and does not go on:
// who sends the half of one keeps nobody out for longer than that. Those go first
// that have stopped, then those that are too slow.
func (l *listener) retireStalled(of netip.Addr) *conn {
	now, looks := l.g.awake.now(), 8
	for _, hasStalled := range []func(*conn, int64) bool{(*conn).hasStopped, (*conn).isTooSlow} {
		for c := range l.conns {
			if !c.isFrom(of) || !hasStalled(c, now) || c.heldUp() {
				continue
			}
			if looks == 0 {
				return nil
			}
			if looks--; c.unread() == 0 && (!l.budget || c.retire()) {
				return c
			}
		}
	}
	return nil
}

// hasStopped tells whether nothing has come for a while of what is awaited, and
// nothing else is under way. The caller has l.mu.
func (c *conn) hasStopped(now int64) bool {
	before := now - int64(c.l.g.cfg.pace.stall)
	switch {
	case c.idleSince.Load() > before:
		return false
	case c.l.budget:
		return c.underWay.Load() == 0 && c.arrivals.any()
	default:
		return c.bodyBeganBefore(before) || c.streamsBeganBefore(before)
	}
}

// isTooSlow tells whether all that comes of a gRPC caller comes too slowly, and it
// has made no call lately. (Those of HTTP are answered, by the sweep.)
func (c *conn) isTooSlow(now int64) bool {
	return c.l.budget && c.slowMessages.Load() && c.underWay.Load() == 0 && c.arrivals.any() &&
		c.callEnded.Load() <= now-int64(c.l.g.cfg.pace.rest)
}

// streamsBeganBefore tells whether there are requests of HTTP/2, all of which
// await their bodies since then. The caller has l.mu.
func (c *conn) streamsBeganBefore(moment int64) bool {
	for s := range c.streams {
		if !s.bodyBeganBefore(moment) {
			return false
		}
	}
	return len(c.streams) > 0
}

// bodyBeganBefore tells whether a body is awaited since then; one that has waited
// for slots is so from when it got them.
func (w *watch) bodyBeganBefore(moment int64) bool {
	since := w.bodySince.Load()
	return since != 0 && since <= moment
}

// origin is what counts as one where connections are shared out: of IPv6 a
// network, as who has one address there has all of them.
func origin(a netip.Addr) netip.Addr {
	a = a.Unmap().WithZone("")
	if a.Is6() {
		a = netip.PrefixFrom(a, 64).Masked().Addr()
	}
	return a
}

// isFrom tells whether the connection has that origin, if one is given.
func (c *conn) isFrom(of netip.Addr) bool { return !of.IsValid() || c.origin == of }

func (c *conn) goesBefore(other *conn) bool {
	if served := c.served.Load(); served != other.served.Load() {
		return !served
	}
	return c.idle().Load() < other.idle().Load()
}

// idle is since when the connection has been, while it is. With open streams
// pings do not count, which some callers send to keep them.
func (c *conn) idle() *atomic.Int64 {
	if c.openStreams.Load() > 0 {
		return &c.callEnded
	}
	return &c.idleSince
}

// gotMessage tells whether some of a message of gRPC has come since, or its rest is
// still to come.
func (c *conn) gotMessage(since int64) bool {
	return c.arrivals.lastData.Load() > since || c.arrivals.any()
}

// openStream counts a gRPC stream until it is closed.
func (c *conn) openStream() (closeStream func()) {
	c.callEnded.Store(c.l.g.awake.now())
	c.openStreams.Add(1)
	return func() { c.openStreams.Add(-1) }
}

// streamRequests keeps a stream's connection busy while there are any.
type streamRequests struct {
	conn *conn

	mu     sync.Mutex
	n      int
	closed bool
}

func (s *streamRequests) begin() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.n++; s.n == 1 && !s.closed {
		s.conn.begin()
	}
}

func (s *streamRequests) end() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.n--; s.n == 0 && !s.closed {
		s.conn.end()
	}
}

// close is for a stream that ends, perhaps with some left.
func (s *streamRequests) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed = true; s.n > 0 {
		s.conn.end()
	}
}

// followState is told by net/http what its connections do: one is active when the
// head of a request is whole. One that a session has given away is busy already.
func followState(nc net.Conn, state http.ConnState) {
	c := ours(nc)
	switch state {
	case http.StateActive:
		c.endBody() // which a session began to await with the head
		c.underWay.CompareAndSwap(0, 1)
	case http.StateIdle:
		c.calm() // ends the watch over what net/http reads after a request
		c.served.Store(true)
		c.moved()
		c.underWay.CompareAndSwap(1, 0)
	}
}
