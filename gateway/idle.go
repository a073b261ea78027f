// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"net"
	"net/http"
)

// A connection is idle while nothing is under way on it: no request that has
// begun to come, no gRPC call, no answer that is being sent. The first to change
// that has it: a request that begins, or one who takes its place.

// retired is far below what requests add to it.
const retired = -1 << 30

// begin counts something that is under way; false if the connection is retired.
func (c *conn) begin() bool { return c.underWay.Add(1) > 0 }

func (c *conn) end() {
	c.idleSince.Store(c.l.g.awake.now())
	c.underWay.Add(-1)
}

func (c *conn) busy() bool { return c.underWay.Load() > 0 }

// retire takes an idle connection from its caller; the next is to close it.
func (c *conn) retire() bool { return c.underWay.CompareAndSwap(0, retired) }

// retireLongestIdle makes room for a newcomer at the expense of the connection
// that has been idle for longest; nil if all are busy. The caller has l.mu, so it
// does not look for long where many turn out to have something unread.
func (l *listener) retireLongestIdle() *conn {
	for range 8 {
		var oldest *conn
		for c := range l.conns {
			if c.underWay.Load() == 0 && (oldest == nil || c.idleSince.Load() < oldest.idleSince.Load()) && !c.arrivals.any() {
				oldest = c
			}
		}
		switch {
		case oldest == nil:
			return nil
		case oldest.unread() > 0: // a request that is not read yet
			oldest.idleSince.Store(l.g.awake.now())
		case oldest.retire():
			return oldest
		}
	}
	return nil
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
		c.idleSince.Store(c.l.g.awake.now())
		c.underWay.CompareAndSwap(1, 0)
	}
}
