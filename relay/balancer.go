// SPDX-License-Identifier: Apache-2.0

package relay

import (
	"context"
	"errors"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/balancer"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/resolver"
	rpcstatus "google.golang.org/grpc/status"
)

// The relay chooses the host of each call itself: a retry goes to another host, and
// the windows of the hosts decide how many batches the relay takes. gRPC's
// balancer keeps a connection to every address that the resolver finds, and sends
// a call to the host in its context.

// policyName is the balancer's name in the service configuration.
const policyName = "ringbatch_relay"

var registerOnce sync.Once

// register adds the balancer to gRPC's global registry. The credentials of a
// connection name the relay that it belongs to.
func register() { registerOnce.Do(func() { balancer.Register(balancerBuilder{}) }) }

type balancerBuilder struct{}

func (balancerBuilder) Name() string { return policyName }

func (balancerBuilder) Build(cc balancer.ClientConn, opts balancer.BuildOptions) balancer.Balancer {
	ctx, cancel := context.WithCancel(context.Background())
	b := &connections{cc: cc, all: map[string]*connection{}, cancel: cancel}
	b.hosts = opts.DialCreds.(relayCredentials).hosts
	go b.keepResolving(ctx, resolveInterval)
	return b
}

// resolveInterval is how often the target is looked up again, to find new hosts.
// gRPC looks only when a connection fails, and asks DNS no more often than this.
const resolveInterval = 30 * time.Second

func (b *connections) keepResolving(ctx context.Context, interval time.Duration) {
	every(ctx, interval, func() { b.cc.ResolveNow(resolver.ResolveNowOptions{}) })
}

type connections struct {
	cc    balancer.ClientConn
	hosts *hosts
	all   map[string]*connection // used by gRPC's serialized calls only

	cancel context.CancelFunc // of keepResolving
}

type connection struct {
	sub  balancer.SubConn
	host *host
}

// nameOf returns a host's name: its address, or its addresses.
func nameOf(e resolver.Endpoint) string {
	var all []string
	for _, a := range e.Addresses {
		all = append(all, a.Addr)
	}
	return strings.Join(all, "|")
}

func (b *connections) UpdateClientConnState(s balancer.ClientConnState) error {
	found := map[string]bool{}
	for _, e := range s.ResolverState.Endpoints {
		name := nameOf(e)
		if name == "" || found[name] {
			continue
		}
		found[name] = true
		if b.all[name] != nil {
			continue
		}
		c := &connection{host: b.hosts.add(name)}
		//lint:ignore SA1019 there is no other way to connect; several addresses are deprecated
		sub, err := b.cc.NewSubConn(e.Addresses,
			balancer.NewSubConnOptions{StateListener: func(s balancer.SubConnState) { b.changed(c, s) }})
		if err != nil {
			return err
		}
		c.sub = sub
		b.all[name] = c
		sub.Connect()
	}
	if len(found) == 0 { // mostly a mistake of the name server: working hosts stay
		b.ResolverError(errors.New("it has no address"))
		return balancer.ErrBadResolverState
	}
	for name, c := range b.all {
		if !found[name] {
			delete(b.all, name)
			c.sub.Shutdown()
			b.hosts.remove(c.host)
		}
	}
	b.hosts.resolved()
	b.cc.UpdateState(balancer.State{ConnectivityState: connectivity.Ready, Picker: picker{}})
	return nil
}

// changed receives the state of a connection from gRPC.
func (b *connections) changed(c *connection, s balancer.SubConnState) {
	switch s.ConnectivityState {
	case connectivity.Ready:
		c.host.connected(c.sub)
	case connectivity.Idle:
		c.host.disconnected(nil)
		c.sub.Connect()
	case connectivity.TransientFailure:
		c.host.disconnected(s.ConnectionError)
	case connectivity.Shutdown:
		c.host.disconnected(nil)
	}
	// A call whose connection ended after the choice waits for a new picker.
	b.cc.UpdateState(balancer.State{ConnectivityState: connectivity.Ready, Picker: picker{}})
}

func (b *connections) ResolverError(err error) {
	b.hosts.unresolved(err.Error())
	if len(b.all) == 0 {
		b.cc.UpdateState(balancer.State{ConnectivityState: connectivity.TransientFailure, Picker: picker{}})
	}
}

func (b *connections) UpdateSubConnState(balancer.SubConn, balancer.SubConnState) {}
func (b *connections) ExitIdle()                                                  {}

func (b *connections) Close() {
	b.cancel()
	for _, c := range b.all {
		c.sub.Shutdown()
		b.hosts.remove(c.host)
	}
}

// picker sends a call to the host in its context.
type picker struct{}

// route travels in a call's context.
type route struct {
	host *host
	sent atomic.Bool // bytes were sent: the host may have run the call
}

type routeKey struct{}

func (r *route) to(ctx context.Context) context.Context {
	return context.WithValue(ctx, routeKey{}, r)
}

func (picker) Pick(info balancer.PickInfo) (balancer.PickResult, error) {
	r, ok := info.Ctx.Value(routeKey{}).(*route)
	if !ok {
		return balancer.PickResult{}, rpcstatus.Error(codes.Unavailable, "a call without a host")
	}
	sub := r.host.connection()
	if sub == nil {
		return balancer.PickResult{}, rpcstatus.Error(codes.Unavailable, r.host.name+" is not connected")
	}
	return balancer.PickResult{SubConn: sub, Done: func(d balancer.DoneInfo) {
		if d.BytesSent {
			r.sent.Store(true)
		}
	}}, nil
}

// endpoints converts addresses for gRPC's manual resolver.
func endpoints(list []string) (all []resolver.Endpoint) {
	for _, address := range slices.Compact(slices.Sorted(slices.Values(list))) {
		host, _, _ := net.SplitHostPort(address) // checkAddresses has checked it
		all = append(all, resolver.Endpoint{Addresses: []resolver.Address{{Addr: address, ServerName: host}}})
	}
	return all
}
