// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"syscall"

	"github.com/ringbatch/ringbatch/gateway/core"
	"github.com/ringbatch/ringbatch/gateway/grpcapi"
	"github.com/ringbatch/ringbatch/gateway/httpapi"
	"google.golang.org/grpc"
)

// Gateway serves one broker.
type Gateway struct {
	core      *core.Gateway
	listeners []*core.Listener
	web       *http.Server // nil without HTTP
	rpc       *grpc.Server // nil without gRPC
}

// New gives a gateway its doors.
func New(c *core.Gateway) *Gateway { return &Gateway{core: c} }

// The doors, as logs, metrics and flags name them.
const (
	doorHTTP = "http"
	doorGRPC = "grpc"
)

// Serve opens the doors and serves until ctx ends; then it drains.
func (g *Gateway) Serve(ctx context.Context) error {
	defer g.core.CloseModels()
	defer g.closeDoors()
	web, err := g.listen(doorHTTP, g.core.Cfg.HTTP)
	if err != nil {
		return err
	}
	rpc, err := g.listen(doorGRPC, g.core.Cfg.GRPC)
	if err != nil {
		return err
	}
	life, stop := context.WithCancel(context.Background())
	defer stop()
	go g.core.Watch(life)
	failed := make(chan error, 2)
	var httpAddr, grpcAddr net.Addr
	if web != nil {
		httpAddr, g.web = web.Addr(), httpapi.NewHTTP(g.core, web)
		go func() { failed <- httpapi.ServeHTTP(g.web, web) }()
	}
	if rpc != nil {
		grpcAddr, g.rpc = rpc.Addr(), grpcapi.NewGRPC(g.core)
		go func() { failed <- g.rpc.Serve(rpc) }()
	}
	if g.core.Cfg.Started != nil {
		g.core.Cfg.Started(httpAddr, grpcAddr)
	}
	select {
	case <-ctx.Done():
		return g.drain()
	case err := <-failed:
		return err
	}
}

// drain makes the gateway not ready, so that load balancers send requests elsewhere,
// and then lets accepted requests finish.
func (g *Gateway) drain() error {
	g.core.BeginDrain()
	ctx, cancel := context.WithTimeout(context.Background(), g.core.Cfg.DrainTime)
	defer cancel()
	ended := make(chan struct{}, 2)
	go func() {
		if g.web != nil {
			_ = g.web.Shutdown(ctx)
		}
		ended <- struct{}{}
	}()
	go func() {
		if g.rpc != nil {
			g.rpc.GracefulStop()
		}
		ended <- struct{}{}
	}()
	idle := g.core.AwaitIdle(ctx)
	for range 2 {
		select {
		case <-ended:
		case <-idle: // only incomplete requests are left
			return nil
		case <-ctx.Done():
			return fmt.Errorf("draining: %d requests did not finish in %v", g.core.InFlight.Load(), g.core.Cfg.DrainTime)
		}
	}
	return nil
}

func (g *Gateway) listen(door, address string) (*core.Listener, error) {
	if address == core.Off {
		return nil, nil
	}
	l, err := net.Listen("tcp", address)
	if errors.Is(err, syscall.EADDRINUSE) {
		_, port, _ := net.SplitHostPort(address)
		return nil, fmt.Errorf("port %s is taken; choose another with --%s PORT", port, door)
	}
	if err != nil {
		return nil, err
	}
	g.listeners = append(g.listeners, core.NewListener(door, l, g.core))
	return g.listeners[len(g.listeners)-1], nil
}

func (g *Gateway) closeDoors() {
	if g.web != nil {
		g.web.Close()
	}
	if g.rpc != nil {
		g.rpc.Stop()
	}
	for _, l := range g.listeners {
		l.Close()
	}
}

// RefusedConnections counts, by door, connections beyond --max-connections or
// --caller-connections.
func (g *Gateway) RefusedConnections() map[string]uint64 {
	n := map[string]uint64{}
	for _, l := range g.listeners {
		n[l.Door] = l.Refused.Load()
	}
	return n
}
