// SPDX-License-Identifier: Apache-2.0

package core

import (
	"context"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"
)

// Listener bounds the connections of a door: of all callers, and of each address.
type Listener struct {
	net.Listener
	G       *Gateway
	Door    string // for logs and metrics
	Refusal []byte // sent to a refused HTTP caller; may be nil
	Refused atomic.Uint64
	logged  rarely

	mu      sync.Mutex
	conns   map[*Conn]struct{}
	origins map[netip.Addr]int // connections of each address
}

func NewListener(door string, l net.Listener, g *Gateway) *Listener {
	return &Listener{Listener: l, G: g, Door: door, conns: map[*Conn]struct{}{}, origins: map[netip.Addr]int{}}
}

// Accept refuses connections beyond the limits at once, so that callers do not wait.
func (l *Listener) Accept() (net.Conn, error) {
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

func (l *Listener) newConn(nc net.Conn) *Conn {
	c := &Conn{Conn: nc, L: l}
	c.Peer.local, c.Peer.Remote = addrPort(nc.LocalAddr()), addrPort(nc.RemoteAddr())
	c.origin = origin(c.Peer.Remote.Addr())
	return c
}

func (l *Listener) addConn(c *Conn) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.conns) >= l.G.Cfg.MaxConnections || l.origins[c.origin] >= l.G.Cfg.CallerConnections {
		return false
	}
	l.conns[c] = struct{}{}
	l.origins[c.origin]++
	c.Who = Caller{Peer: &c.Peer, Use: l.G.Limits.join(c.origin.String())}
	return true
}

func (l *Listener) removeConn(c *Conn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if _, known := l.conns[c]; !known {
		return
	}
	delete(l.conns, c)
	if l.origins[c.origin]--; l.origins[c.origin] == 0 {
		delete(l.origins, c.origin)
	}
	l.G.Limits.leave(c.origin.String())
}

func (l *Listener) refuseConn(c *Conn) {
	n := l.Refused.Add(1)
	l.logged.Do(func() {
		l.G.Log.Warn("a connection was refused: there are as many as --max-connections, or as --caller-connections of its address",
			"door", l.Door, "address", c.origin, "refused", n)
	})
	if len(l.Refusal) > 0 {
		_ = c.Conn.SetWriteDeadline(time.Now().Add(time.Second))
		_, _ = c.Conn.Write(l.Refusal)
	}
	c.Conn.Close()
}

// Conn is a connection of either door.
type Conn struct {
	net.Conn
	L      *Listener
	Peer   Peer
	origin netip.Addr
	Who    Caller // without a token

	shown  atomic.Pointer[shown]
	closed sync.Once

	Sending  atomic.Int32 // gRPC: answers that the transport sends from slots
	Arriving arriving     // gRPC
}

// Close closes the connection, and gives its counts back once.
func (c *Conn) Close() error {
	c.closed.Do(func() {
		c.Arriving.endConn(c)
		if c.Sending.Load() > 0 { // the transport forgets the buffers of a broken connection
			time.AfterFunc(time.Second, c.L.G.collectGarbage)
		}
		c.L.removeConn(c)
	})
	return c.Conn.Close()
}

type connKey struct{}

// WithConn puts a connection into its requests' contexts.
func WithConn(ctx context.Context, nc net.Conn) context.Context {
	return context.WithValue(ctx, connKey{}, ours(nc))
}

func ConnOf(ctx context.Context) *Conn {
	c, _ := ctx.Value(connKey{}).(*Conn)
	return c
}

// ours is the accepted connection, below TLS.
func ours(nc net.Conn) *Conn {
	if t, ok := nc.(interface{ NetConn() net.Conn }); ok {
		nc = t.NetConn()
	}
	return nc.(*Conn)
}

func addrPort(a net.Addr) netip.AddrPort {
	if t, ok := a.(*net.TCPAddr); ok {
		return t.AddrPort()
	}
	return netip.AddrPort{}
}

// origin returns the address that limits count by. For IPv6 it is the /64 network,
// whose addresses a caller can all use.
func origin(a netip.Addr) netip.Addr {
	a = a.Unmap().WithZone("")
	if a.Is6() {
		a = netip.PrefixFrom(a, 64).Masked().Addr()
	}
	return a
}

// rarely runs a function at most once a second.
type rarely struct{ last atomic.Int64 }

func (s *rarely) Do(f func()) {
	now, last := time.Now().UnixNano(), s.last.Load()
	if now-last >= int64(time.Second) && s.last.CompareAndSwap(last, now) {
		f()
	}
}
