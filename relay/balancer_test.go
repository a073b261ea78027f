// SPDX-License-Identifier: Apache-2.0

package relay

import (
	"context"
	"log/slog"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/balancer"
	"google.golang.org/grpc/resolver"

	"github.com/ringbatch/ringbatch/internal/testlog"
)

// asked tells each time that the target is to be looked up.
type asked struct {
	balancer.ClientConn
	again chan struct{}
}

func (a asked) ResolveNow(resolver.ResolveNowOptions) {
	select {
	case a.again <- struct{}{}:
	default:
	}
}

func TestATargetIsLookedUpAgainAlsoWhileNoConnectionFails(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	b := &connections{cc: asked{again: make(chan struct{})}}
	go b.keepResolving(ctx, time.Nanosecond)
	for range 3 {
		select {
		case <-b.cc.(asked).again:
		case <-time.After(patience):
			t.Fatal("it is not")
		}
	}
}

// lookedUp is gRPC's side of a balancer, which counts connections.
type lookedUp struct {
	balancer.ClientConn
	open int
}

func (l *lookedUp) UpdateState(balancer.State) {}
func (l *lookedUp) NewSubConn([]resolver.Address, balancer.NewSubConnOptions) (balancer.SubConn, error) {
	l.open++
	return oneConn{of: l}, nil
}

type oneConn struct {
	balancer.SubConn
	of *lookedUp
}

func (c oneConn) Connect()  {}
func (c oneConn) Shutdown() { c.of.open-- }

func TestHostsStayWhenTheirNameHasNoAddressAnyMore(t *testing.T) {
	log := &testlog.Log{}
	cc := &lookedUp{}
	b := &connections{cc: cc, all: map[string]*connection{}, hosts: newHosts(slog.New(slog.NewTextHandler(log, nil)), 8)}
	found := func(addresses ...string) error {
		return b.UpdateClientConnState(balancer.ClientConnState{ResolverState: resolver.State{Endpoints: endpoints(addresses)}})
	}
	for i, step := range []struct {
		addresses []string
		bad       bool // gRPC is to ask again by itself
		open      int
	}{
		{nil, true, 0}, {[]string{"a:1", "b:1"}, false, 2}, {nil, true, 2}, {nil, true, 2}, {[]string{"b:1"}, false, 1},
	} {
		if err := found(step.addresses...); (err == balancer.ErrBadResolverState) != step.bad || cc.open != step.open ||
			len(b.hosts.all) != step.open {
			t.Errorf("%d: %v: %v, %d connections to %d hosts, want %d", i, step.addresses, err, cc.open, len(b.hosts.all), step.open)
		}
	}
	if n := strings.Count(log.String(), "cannot be resolved"); n != 2 {
		t.Errorf("said %d times, want once for each of the two", n)
	}
}

func TestTheNameInACertificateIsTheHostsWithoutItsPort(t *testing.T) {
	want := map[string]string{"gpu1:8001": "gpu1", "10.0.0.1:8001": "10.0.0.1", "[::1]:8001": "::1"}
	for _, e := range endpoints([]string{"gpu1:8001", "10.0.0.1:8001", "[::1]:8001"}) {
		if a := e.Addresses[0]; a.ServerName != want[a.Addr] {
			t.Errorf("%s: %q", a.Addr, a.ServerName)
		}
	}
}
