// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"context"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"
)

// listener bounds the connections of a door: of all callers, and of one address.
type listener struct {
	net.Listener
	g       *gateCore
	door    string // for logs and metrics
	refusal []byte // the answer to a refused HTTP caller; nil: none
	refused atomic.Uint64
	logged  rarely

	mu      sync.Mutex
	conns   map[*conn]struct{}
	origins map[netip.Addr]int // connections of each address
}

func newListener(door string, l net.Listener, g *gateCore) *listener {
	return &listener{Listener: l, g: g, door: door, conns: map[*conn]struct{}{}, origins: map[netip.Addr]int{}}
}

// Accept refuses connections beyond the limits at once, so that their callers do not wait.
func (l *listener) Accept() (net.Conn, error) {
	for {
		nc, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		c := l.newConn(nc)
		if l.addConn(c) {
			return c, nil
		}
		l.refuseConn(c)
	}
}

func (l *listener) newConn(nc net.Conn) *conn {
	c := &conn{Conn: nc, l: l}
	c.peer.local, c.peer.remote = addrPort(nc.LocalAddr()), addrPort(nc.RemoteAddr())
	c.origin = origin(c.peer.remote.Addr())
	return c
}

// addConn reports whether there is room for the connection.
func (l *listener) addConn(c *conn) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.conns) >= l.g.cfg.MaxConnections || l.origins[c.origin] >= l.g.cfg.CallerConnections {
		return false
	}
	l.conns[c] = struct{}{}
	l.origins[c.origin]++
	c.who = caller{peer: &c.peer, use: l.g.limits.join(c.origin.String())}
	return true
}

func (l *listener) removeConn(c *conn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if _, known := l.conns[c]; !known {
		return
	}
	delete(l.conns, c)
	if l.origins[c.origin]--; l.origins[c.origin] == 0 {
		delete(l.origins, c.origin)
	}
	l.g.limits.leave(c.origin.String())
}

func (l *listener) refuseConn(c *conn) {
	n := l.refused.Add(1)
	l.logged.Do(func() {
		l.g.log.Warn("a connection was refused: there are as many as --max_connections, or as --caller_connections of its address",
			"door", l.door, "address", c.origin, "refused", n)
	})
	if len(l.refusal) > 0 {
		_ = c.Conn.SetWriteDeadline(time.Now().Add(time.Second))
		_, _ = c.Conn.Write(l.refusal)
	}
	c.Conn.Close()
}

// conn is a connection of either door.
type conn struct {
	net.Conn
	l      *listener
	peer   peer
	origin netip.Addr
	who    caller // without a token

	shown  atomic.Pointer[shown]
	closed sync.Once

	sending  atomic.Int32 // gRPC: answers that the transport sends from slots
	arriving arriving     // gRPC
}

// Close ends the connection and what is counted of it.
func (c *conn) Close() error {
	c.closed.Do(func() {
		c.arriving.end(c)
		if c.sending.Load() > 0 { // the transport forgets the buffers of a broken connection
			time.AfterFunc(time.Second, c.l.g.collectGarbage)
		}
		c.l.removeConn(c)
	})
	return c.Conn.Close()
}

type connKey struct{}

// withConn puts a connection into its requests' contexts.
func withConn(ctx context.Context, nc net.Conn) context.Context {
	return context.WithValue(ctx, connKey{}, ours(nc))
}

func connOf(ctx context.Context) *conn {
	c, _ := ctx.Value(connKey{}).(*conn)
	return c
}

// ours is the accepted connection, below TLS.
func ours(nc net.Conn) *conn {
	if t, ok := nc.(interface{ NetConn() net.Conn }); ok {
		nc = t.NetConn()
	}
	return nc.(*conn)
}

func addrPort(a net.Addr) netip.AddrPort {
	if t, ok := a.(*net.TCPAddr); ok {
		return t.AddrPort()
	}
	return netip.AddrPort{}
}

// origin is the address that limits count by. Of IPv6 it is the /64 network: a
// caller with one address there has all of them.
func origin(a netip.Addr) netip.Addr {
	a = a.Unmap().WithZone("")
	if a.Is6() {
		a = netip.PrefixFrom(a, 64).Masked().Addr()
	}
	return a
}

// rarely does a thing at most once a second.
type rarely struct{ last atomic.Int64 }

func (s *rarely) Do(f func()) {
	now, last := time.Now().UnixNano(), s.last.Load()
	if now-last >= int64(time.Second) && s.last.CompareAndSwap(last, now) {
		f()
	}
}
