// SPDX-License-Identifier: Apache-2.0

package grpcapi

import (
	"context"
	"errors"
	"net"
	"time"

	"github.com/ringbatch/ringbatch/gateway/core"
	"google.golang.org/grpc/stats"
)

// rpcConn is a gRPC connection above TLS. The gateway does not read it while its
// caller, or all callers together, have too many bytes in flight.
type rpcConn struct {
	net.Conn
	conn *core.Conn
}

var errBuffersFull = errors.New("the caller's share of the gateway's buffers is full")

func (c rpcConn) Read(p []byte) (int, error) {
	if err := c.awaitRoom(); err != nil {
		return 0, err
	}
	n, err := c.Conn.Read(p)
	c.conn.Arriving.Add(c.conn, n)
	return n, err
}

// awaitRoom gives up a connection that waits too long: its own incomplete messages
// may be the bytes that fill the buffers.
func (c rpcConn) awaitRoom() error {
	g := c.conn.L.G
	for end := time.Now().Add(g.Cfg.Pace.Budget); g.Limits.Full(c.conn.Who.Use); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			return errBuffersFull
		}
	}
	return nil
}

// rpcStats counts arrivals as the transport reports them.
type rpcStats struct{}

func (rpcStats) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context   { return ctx }
func (rpcStats) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }
func (rpcStats) HandleConn(context.Context, stats.ConnStats)                       {}

func (rpcStats) HandleRPC(ctx context.Context, s stats.RPCStats) {
	switch s := s.(type) {
	case *stats.Begin:
		connOfRPC(ctx).Arriving.BeginCall()
	case *stats.InHeader:
		c := connOfRPC(ctx)
		c.Arriving.Arrived(c, s.WireLength)
	case *stats.InPayload:
		c := connOfRPC(ctx)
		c.Arriving.Arrived(c, s.WireLength)
	case *stats.End:
		c := connOfRPC(ctx)
		c.Arriving.EndCall(c)
	}
}
