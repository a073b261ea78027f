// SPDX-License-Identifier: Apache-2.0

package relay

import (
	"context"
	"testing"
	"time"

	"google.golang.org/grpc/balancer"
	"google.golang.org/grpc/resolver"
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

func TestTheNameInACertificateIsTheHostsWithoutItsPort(t *testing.T) {
	want := map[string]string{"gpu1:8001": "gpu1", "10.0.0.1:8001": "10.0.0.1", "[::1]:8001": "::1"}
	for _, e := range endpoints([]string{"gpu1:8001", "10.0.0.1:8001", "[::1]:8001"}) {
		if a := e.Addresses[0]; a.ServerName != want[a.Addr] {
			t.Errorf("%s: %q", a.Addr, a.ServerName)
		}
	}
}
