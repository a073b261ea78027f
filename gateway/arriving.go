// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"sync"
)

// arriving counts the bytes of a gRPC connection whose message is not whole yet.
// The transport holds them, and does not say how many.
//
//	read from the connection      +n
//	message or headers are whole  −their size on the wire
//	no call is open               =0
type arriving struct {
	mu    sync.Mutex
	bytes int
	calls int
	ended bool
}

// Frames that carry no message: window updates, pings, settings. Each message
// takes this much with it, so that a long-lived connection does not fill up with them.
const (
	frameHead     = 9
	frameBytes    = 16 << 10
	otherPerFrame = 64
)

// add counts bytes that were read. Those that come while no call is open are the
// rest of calls that have ended: the transport drops them.
func (a *arriving) add(c *conn, n int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.calls > 0 && !a.ended {
		a.count(c, n)
	}
}

// arrived takes a message away that is whole. The call counts it from here on.
func (a *arriving) arrived(c *conn, size int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.count(c, -min(a.bytes, size+frameHead*(1+size/frameBytes)+otherPerFrame))
}

func (a *arriving) beginCall() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.calls++
}

func (a *arriving) endCall(c *conn) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.calls--; a.calls == 0 {
		a.count(c, -a.bytes)
	}
}

// end gives everything back: the connection is closed.
func (a *arriving) end(c *conn) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.count(c, -a.bytes)
	a.ended = true
}

// count needs mu.
func (a *arriving) count(c *conn, n int) {
	a.bytes += n
	c.who.use.bytes.Add(int64(n))
	c.l.g.limits.used.Add(int64(n))
}
