// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"context"
	"io"
	"maps"
	"net"
	"net/netip"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// listener bounds the connections and knows them all.
type listener struct {
	net.Listener
	g     *Gateway
	most  int
	ofOne int    // most of one origin, so that others find room
	full  []byte // what is said to one too many,
	crowd []byte // and to one too many of its origin
	told  seldom // of those, in the log
	name  string // of the door, there

	refused atomic.Uint64 // of both
	idle    time.Duration // after which a connection is closed; 0: its server sees to that
	budget  bool          // stop reading while the buffers are full

	mu      sync.Mutex
	conns   map[*conn]struct{}
	origins map[netip.Addr]int   // how many of them
	streams map[*stream]struct{} // requests of HTTP/2
}

func newListener(name string, l net.Listener, g *Gateway) *listener {
	return &listener{Listener: l, g: g, name: name, most: g.cfg.MaxConnections, ofOne: g.cfg.connectionsOfOne(addrPort(l.Addr()).Addr()),
		conns: map[*conn]struct{}{}, origins: map[netip.Addr]int{}, streams: map[*stream]struct{}{}}
}

// connectionsOfOne is how many one origin may have at a door of that address. On
// loopback all callers have the same one.
func (c *Config) connectionsOfOne(door netip.Addr) int {
	switch {
	case c.CallerConnections > 0:
		return c.CallerConnections
	case door.Unmap().IsLoopback():
		return c.MaxConnections
	default:
		return c.MaxConnections - c.MaxConnections/8
	}
}

// Accept never gives more connections than allowed, of all or of one origin:
// beyond, one that is idle has to go. If none is, the newcomer is hung up on at
// once, so that it does not wait for one that never ends.
func (l *listener) Accept() (net.Conn, error) {
	for {
		nc, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		c := &conn{Conn: nc, l: l}
		c.peer.local, c.peer.remote = addrPort(nc.LocalAddr()), addrPort(nc.RemoteAddr())
		c.origin = origin(c.peer.remote.Addr())
		c.moved()
		l.mu.Lock()
		var leaving *conn
		crowded := l.ofOne < l.most && l.origins[c.origin] >= l.ofOne
		if crowded || len(l.conns) >= l.most {
			var of netip.Addr
			if crowded {
				of = c.origin
			}
			if leaving = l.makeRoom(of); leaving == nil {
				l.mu.Unlock()
				l.sendAway(c, crowded)
				continue
			}
			l.forget(leaving)
		}
		c.watch.init(l.g)
		if l.budget {
			c.arrivals.init(l.g.awake)
		}
		c.who = caller{peer: &c.peer, use: l.g.callers.join(c.peer.address())}
		l.conns[c] = struct{}{}
		l.origins[c.origin]++
		l.mu.Unlock()
		if leaving != nil {
			leaving.Close()
		}
		return c, nil
	}
}

// sendAway hangs up on one too many, of its origin if that is crowded.
func (l *listener) sendAway(c *conn, crowded bool) {
	l.refused.Add(1)
	text := l.full
	if crowded {
		text = l.crowd
	}
	l.told.Do(func() {
		log := l.g.log.With("door", l.name, "address", c.origin, "refused", l.refused.Load())
		if crowded {
			log.Warn("an address has as many connections as one may have, none of them idle: another was refused; where many callers share it, raise --caller_connections", "connections", l.ofOne)
		} else {
			log.Warn("all connections of a door are in use: another was refused; raise --max_connections, or start another gateway", "connections", l.most)
		}
	})
	if len(text) > 0 {
		_ = c.Conn.SetWriteDeadline(time.Now().Add(time.Second))
		_, _ = c.Conn.Write(text)
	}
	c.Conn.Close()
}

// forget takes a connection off the list. The caller has l.mu.
func (l *listener) forget(c *conn) {
	if _, known := l.conns[c]; !known {
		return
	}
	delete(l.conns, c)
	if l.origins[c.origin]--; l.origins[c.origin] == 0 {
		delete(l.origins, c.origin)
	}
}

func addrPort(a net.Addr) netip.AddrPort {
	if t, ok := a.(*net.TCPAddr); ok {
		return t.AddrPort()
	}
	return netip.AddrPort{}
}

func (p *peer) address() string { return "address " + p.remote.Addr().Unmap().String() }

// sweep ends what takes too long. Now is awake's.
func (l *listener) sweep(now int64) {
	l.mu.Lock()
	for c := range l.conns {
		c.sweep(now)
	}
	short := l.budget && l.g.budget.short.Swap(false)
	if l.budget {
		for c := range l.conns {
			c.sweepBuffers(now, short)
		}
	}
	streams := slices.Collect(maps.Keys(l.streams))
	l.mu.Unlock()
	for _, s := range streams {
		s.sweep(now)
	}
	if short {
		l.g.collect.Do(runtime.GC) // what those had received who were hung up on
	}
}

// conn is a connection of either door.
type conn struct {
	net.Conn
	watch  // of HTTP/1's request
	l      *listener
	peer   peer
	origin netip.Addr
	who    caller // without a token

	underWay  atomic.Int32 // requests, see idle.go
	toRead    atomic.Int32 // of those, what waits for a gRPC caller to read
	idleSince atomic.Int64 // a moment of awake's, for while none is
	callEnded atomic.Int64 // such a moment: the last of them did, or a stream began
	served    atomic.Bool  // one was
	// Of gRPC: streams, with requests under way or without.
	openStreams atomic.Int32

	// Of a session: what to do when the caller hangs up while its request is
	// under way.
	hungUp atomic.Pointer[context.CancelFunc]
	http   *webServer
	// Of one that it has given to net/http: a Content-Length has not come there.
	noLength atomic.Bool

	// Of HTTP/2: its requests. Guarded by l.mu.
	streams map[*stream]struct{}

	// Of gRPC: the messages that have not come whole, and what keeps the caller
	// from sending the rest.
	arrivals     arrivals
	waits        atomic.Bool  // a read, for the buffers
	fullStreams  atomic.Int32 // that take no requests until they have answered some
	slowMessages atomic.Bool  // the last sweep found that all of them come too slowly
	givenUp      atomic.Bool

	shown      atomic.Pointer[shown]
	identities struct {
		sync.Mutex
		use  map[string]*usage
		gone bool
	}

	closed sync.Once
	gone   atomic.Bool // it is closed
}

func (c *conn) Read(p []byte) (int, error) {
	if c.l.budget {
		if err := c.waitForBudget(); err != nil {
			return 0, err
		}
	}
	n, err := c.Conn.Read(p)
	if n > 0 {
		c.moved()
	}
	if c.bodySince.Load() != 0 {
		c.bodyGot.Add(int64(n))
	}
	return n, err
}

func (c *conn) Close() error {
	c.closed.Do(func() {
		c.gone.Store(true)
		c.l.mu.Lock()
		c.l.forget(c)
		c.l.mu.Unlock()
		c.l.g.callers.leave(c.peer.address(), c.who.use)
		c.identities.Lock()
		defer c.identities.Unlock()
		for name, u := range c.identities.use {
			c.l.g.callers.leave(name, u)
		}
		c.identities.use, c.identities.gone = nil, true
	})
	return c.Conn.Close()
}

// calm ends every watch over the connection.
func (c *conn) calm() {
	c.bodySince.Store(0)
	c.answerUntil.Store(0)
}

// linger closes the connection so that the caller can still read the answer:
// closing it with something unread would make the kernel take the answer back. A
// caller that still sends has longer, but not for ever; so has one that could not
// send because this machine stood still.
func (c *conn) linger() {
	defer c.Close()
	t, ok := c.Conn.(*net.TCPConn)
	if !ok || t.CloseWrite() != nil {
		return
	}
	for end := time.Now().Add(c.l.g.cfg.pace.body); ; {
		began := time.Now()
		_ = c.SetReadDeadline(began.Add(lingerTime))
		n, err := io.Copy(io.Discard, c.Conn)
		silent := n == 0 && c.unread() == 0 && time.Since(began) < lingerTime+standstill
		if silent || !isTimeout(err) || began.After(end) {
			return
		}
	}
}

// hasHungUp tells whether the caller has, without reading.
func (c *conn) hasHungUp() bool {
	t, ok := c.Conn.(*net.TCPConn)
	if !ok {
		return false
	}
	raw, err := t.SyscallConn()
	if err != nil {
		return true
	}
	gone := false
	err = raw.Control(func(fd uintptr) {
		poll := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}
		n, err := unix.Poll(poll, 0)
		gone = err == nil && n > 0 && poll[0].Revents&(unix.POLLRDHUP|unix.POLLHUP|unix.POLLERR) != 0
	})
	return gone || err != nil
}

// unread is what the kernel has of what the caller sent: see awaitBody.
func (c *conn) unread() (n int64) {
	if t, ok := c.Conn.(*net.TCPConn); ok {
		if raw, err := t.SyscallConn(); err == nil {
			_ = raw.Control(func(fd uintptr) {
				got, _ := unix.IoctlGetInt(int(fd), unix.TIOCINQ)
				n = int64(got)
			})
		}
	}
	return n
}

// received is how much of what was written the caller has.
func (c *conn) received() (n int64) {
	if t, ok := c.Conn.(*net.TCPConn); ok {
		if raw, err := t.SyscallConn(); err == nil {
			_ = raw.Control(func(fd uintptr) {
				if info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO); err == nil {
					n = int64(info.Bytes_acked)
				}
			})
		}
	}
	return n
}

// lookForHangUps ends the requests of callers that have hung up. Nobody reads
// from a session's connection while its request is under way.
func (l *listener) lookForHangUps() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for c := range l.conns {
		if cancel := c.hungUp.Load(); cancel != nil && c.bodySince.Load() == 0 && c.busy() && c.hasHungUp() {
			(*cancel)()
		}
	}
}

// closeAll hangs up on everybody.
func (l *listener) closeAll() {
	l.mu.Lock()
	var all []*conn
	for c := range l.conns {
		all = append(all, c)
	}
	l.mu.Unlock()
	for _, c := range all {
		c.Close()
	}
}

func (c *conn) sweep(now int64) {
	if c.l.idle > 0 && !c.busy() && time.Duration(now-c.idleSince.Load()) > c.l.idle {
		_ = c.SetReadDeadline(past)
	}
	if c.slowAnswer(now) {
		c.l.g.log.Warn("a caller does not read its answer, hung up", "address", c.peer.remote)
		_ = c.SetDeadline(past) // net/http may still read, before it writes
	}
	if c.slowBody(now, c.unread) {
		_ = c.SetReadDeadline(past) // the handler finds out, and answers
	}
}

// sweepBuffers hangs up on a gRPC caller that is slow with a message, or has
// stopped in the middle of it, while others lack the memory that it holds.
func (c *conn) sweepBuffers(now int64, short bool) {
	some, all := c.arrivals.slow(now, c.heldUp(), &c.l.g.cfg.pace, c.unread)
	if c.slowMessages.Store(all); some && short {
		c.l.g.log.Warn("the buffers are full, a caller that does not finish its message is hung up on", "address", c.peer.remote)
		c.givenUp.Store(true)
		_ = c.SetReadDeadline(past)
	}
}

// heldUp tells whether it is us who keep a gRPC caller from sending.
func (c *conn) heldUp() bool { return c.fullStreams.Load() > 0 || c.waits.Load() && c.unread() > 0 }

// waitForBudget holds a connection up while the buffers are full; one that
// waits for too long is given up, which makes room for the others.
func (c *conn) waitForBudget() error {
	g := c.l.g
	if !g.budget.full() {
		return nil
	}
	c.waits.Store(true)
	defer c.waits.Store(false)
	g.collect.Do(runtime.GC) // what is counted may be garbage
	deadline := time.Now().Add(g.cfg.pace.budget)
	for g.budget.full() {
		g.budget.short.Store(true)
		if time.Now().After(deadline) || c.givenUp.Load() {
			return errBuffersFull
		}
		time.Sleep(time.Millisecond)
	}
	return nil
}

type connKey struct{}

// withConn puts a connection into its requests' contexts.
func withConn(ctx context.Context, nc net.Conn) context.Context {
	return context.WithValue(ctx, connKey{}, ours(nc))
}

// ours is the connection that net/http has, perhaps with TLS around it.
func ours(nc net.Conn) *conn {
	if t, ok := nc.(interface{ NetConn() net.Conn }); ok {
		nc = t.NetConn()
	}
	return nc.(*conn)
}

func connOf(ctx context.Context) *conn {
	c, _ := ctx.Value(connKey{}).(*conn)
	return c
}
