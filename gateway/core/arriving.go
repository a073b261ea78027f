// SPDX-License-Identifier: Apache-2.0

package core

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

// Add counts bytes that were read. While no call is open, they belong to calls
// that have ended, and the transport drops them.
func (a *arriving) Add(c *Conn, n int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.calls > 0 && !a.ended {
		a.count(c, n)
	}
}

// Arrived takes a message away that is whole. The call counts it from here on.
func (a *arriving) Arrived(c *Conn, size int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.count(c, -min(a.bytes, size+frameHead*(1+size/frameBytes)+otherPerFrame))
}

func (a *arriving) BeginCall() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.calls++
}

func (a *arriving) EndCall(c *Conn) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.calls--; a.calls == 0 {
		a.count(c, -a.bytes)
	}
}

// end gives everything back: the connection is closed.
func (a *arriving) end(c *Conn) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.count(c, -a.bytes)
	a.ended = true
}

// count needs mu.
func (a *arriving) count(c *Conn, n int) {
	a.bytes += n
	c.Who.Use.Bytes.Add(int64(n))
	c.L.G.Limits.Used.Add(int64(n))
}
