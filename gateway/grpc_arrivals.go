// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"encoding/binary"
	"net"
	"sync"
	"sync/atomic"
)

// arrivals follows the frames of HTTP/2 that a gRPC caller sends, and so knows
// its messages that have begun and not ended: the transport holds what has come
// of them, and tells nobody.
type arrivals struct {
	awake *awake

	// lastData is the moment at which some of a message came. One that is whole is not
	// under way until its call has decoded it.
	lastData atomic.Int64

	// Of the reader: the frame that comes.
	head    [9]byte
	have    int // of the head
	left    int // of the payload
	content int // of that, a message's; -1 until the padding's length has come
	kind    byte
	flags   byte
	stream  uint32

	mu         sync.Mutex
	unfinished map[uint32]arrival // by stream
	swept      int64
}

// arrival is a message that has begun, with its prefix: whether it is
// compressed, and how long it is.
type arrival struct {
	prefix    [5]byte
	have      int   // of the prefix
	left, got int64 // of the message
	since     int64 // of awake's
}

const (
	frameData      = 0
	frameReset     = 3
	framePreface   = 255 // what a connection begins with is none, but passes as one
	flagEndStream  = 1
	flagPadded     = 8
	prefaceBytes   = len("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
	mostUnfinished = streamsPerConnection // beyond, these stand for the others
)

func (a *arrivals) init(clock *awake) {
	a.awake, a.unfinished = clock, map[uint32]arrival{}
	a.left, a.kind = prefaceBytes, framePreface
}

// follow is shown what was read.
func (a *arrivals) follow(p []byte) {
	for len(p) > 0 {
		if a.left > 0 {
			n := min(len(p), a.left)
			if a.kind == frameData {
				a.payload(p[:n])
			}
			a.left -= n
			p = p[n:]
		} else {
			n := copy(a.head[a.have:], p)
			a.have += n
			p = p[n:]
			if a.have < len(a.head) {
				return
			}
			a.begin()
		}
		if a.left == 0 && (a.kind == frameReset || a.kind == frameData && a.flags&flagEndStream != 0) {
			a.mu.Lock()
			delete(a.unfinished, a.stream)
			a.mu.Unlock()
		}
	}
}

// begin reads a frame's head.
func (a *arrivals) begin() {
	a.have = 0
	a.left = int(binary.BigEndian.Uint32(a.head[:]) >> 8)
	a.kind, a.flags = a.head[3], a.head[4]
	a.stream = binary.BigEndian.Uint32(a.head[5:]) &^ (1 << 31)
	if a.content = a.left; a.flags&flagPadded != 0 {
		a.content = -1
	}
}

// payload is the next piece of a DATA frame.
func (a *arrivals) payload(p []byte) {
	if a.content < 0 {
		a.content = max(0, a.left-1-int(p[0]))
		p = p[1:]
	}
	p = p[:min(len(p), a.content)]
	a.content -= len(p)
	if len(p) == 0 { // padding
		return
	}
	now := a.awake.now()
	a.lastData.Store(now)
	a.mu.Lock()
	defer a.mu.Unlock()
	m, known := a.unfinished[a.stream]
	for len(p) > 0 {
		if m.have < len(m.prefix) {
			n := copy(m.prefix[m.have:], p)
			m.have += n
			p = p[n:]
			if m.have < len(m.prefix) {
				break
			}
			m.left = int64(binary.BigEndian.Uint32(m.prefix[1:]))
		}
		n := min(int64(len(p)), m.left)
		m.left -= n
		m.got += n
		p = p[n:]
		if m.left == 0 {
			m = arrival{}
		}
	}
	switch {
	case m.have == 0:
		delete(a.unfinished, a.stream)
	case known || len(a.unfinished) < mostUnfinished:
		if m.since == 0 {
			m.since = now
		}
		a.unfinished[a.stream] = m
	}
}

// any tells whether there are such messages.
func (a *arrivals) any() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return len(a.unfinished) > 0
}

// slow tells whether too little has come of some messages, or of all that there
// are. Time in which the caller was held up by us does not count.
func (a *arrivals) slow(now int64, heldUp bool, pace *pace, unread func() int64) (some, all bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if all = len(a.unfinished) > 0; all {
		unread = sync.OnceValue(unread) // a system call
	}
	for stream, m := range a.unfinished {
		if heldUp {
			m.since += max(0, now-max(m.since, a.swept))
			a.unfinished[stream] = m
		}
		slow := pace.slow(now-m.since, m.got, unread)
		some, all = some || slow, all && slow
	}
	a.swept = now
	return some, all
}

// rpcConn is the connection that the transport reads from and writes to, perhaps
// with TLS. What it writes is under way: the transport sends an answer after the
// call has ended.
type rpcConn struct {
	net.Conn
	conn *conn
}

func (c rpcConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.conn.arrivals.follow(p[:n])
	return n, err
}

func (c rpcConn) Write(p []byte) (int, error) {
	c.conn.beginReading()
	n, err := c.Conn.Write(p)
	c.conn.moved()
	c.conn.endReading()
	return n, err
}
