// SPDX-License-Identifier: Apache-2.0

package core

import "sync"

// arriving counts the bytes of incomplete messages of a gRPC connection. The
// transport holds them, and does not report them.
//
//	read from the connection      +n
//	message or headers complete   −their size on the wire
//	no call is open               =0
type arriving struct {
	mu    sync.Mutex
	bytes int
	calls int
	ended bool
}

const (
	frameHead     = 9
	frameBytes    = 16 << 10
	otherPerFrame = 64 // allowance for window updates, pings and settings, which are never subtracted
)

// Add counts bytes that were read. While no call is open, the transport drops them.
func (a *arriving) Add(c *Conn, n int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.calls > 0 && !a.ended {
		a.count(c, n)
	}
}

// Arrived subtracts a complete message, which the call counts from here on.
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

func (a *arriving) endConn(c *Conn) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.count(c, -a.bytes)
	a.ended = true
}

// count needs mu.
func (a *arriving) count(c *Conn, n int) {
	a.bytes += n
	c.Who.Use.bytes.Add(int64(n))
	c.L.G.Limits.used.Add(int64(n))
}
