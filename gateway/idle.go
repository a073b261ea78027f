// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"net"
	"net/http"
)

// A connection is idle while nothing is under way on it: no request that has
// begun to come, no gRPC call, no answer that is being sent. The first to change
// that has it: a request that begins, or one who takes its place. Nobody takes the
// place of a caller that has just been answered: its next request is on the way.

// retired is far below what requests add to it.
const retired = -1 << 30

// begin counts something that is under way; false if the connection is retired.
func (c *conn) begin() bool { return c.underWay.Add(1) > 0 }

func (c *conn) end() {
	c.served.Store(true)
	c.moved()
	c.underWay.Add(-1)
}

// moved notes that something was read or written.
func (c *conn) moved() { c.idleSince.Store(c.l.g.awake.now()) }

func (c *conn) busy() bool { return c.underWay.Load() > 0 }

// retire takes an idle connection from its caller; the next is to close it.
func (c *conn) retire() bool { return c.underWay.CompareAndSwap(0, retired) }

// retireLongestIdle makes room for a newcomer at the expense of the connection
// that has been idle for longest, of those first that never asked for anything;
// nil if none is for long enough. The caller has l.mu, so it does not look for
// long where many turn out to have something unread.
func (l *listener) retireLongestIdle() *conn {
	for range 8 {
		now, ahead := l.g.awake.now(), false
		before := now - int64(l.g.cfg.pace.rest)
		var first *conn
		for c := range l.conns {
			if since := c.idleSince.Load(); since > now { // the clock was put back since, after a standstill
				ahead = c.idleSince.CompareAndSwap(since, now) || ahead
			}
			if c.underWay.Load() == 0 && c.idleSince.Load() <= before && (first == nil || c.goesBefore(first)) && !c.arrivals.any() {
				first = c
			}
		}
		switch {
		case first == nil && ahead: // looks again
		case first == nil:
			return nil
		case first.unread() > 0: // a request that is not read yet
			first.moved()
		case first.retire():
			return first
		}
	}
	return nil
}

func (c *conn) goesBefore(other *conn) bool {
	if served := c.served.Load(); served != other.served.Load() {
		return !served
	}
	return c.idleSince.Load() < other.idleSince.Load()
}

// followState is told by net/http what its connections do. One that a session
// has given away is busy already.
func followState(nc net.Conn, state http.ConnState) {
	c := ours(nc)
	switch state {
	case http.StateActive:
		c.underWay.CompareAndSwap(0, 1)
	case http.StateIdle:
		c.calm() // ends the watch over what net/http reads after a request
		c.served.Store(true)
		c.moved()
		c.underWay.CompareAndSwap(1, 0)
	}
}
