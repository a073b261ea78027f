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

// The relay chooses the host of each call itself; all that is left for gRPC's
// balancer is to keep a connection to every address that the resolver finds,
// to tell how each of them is, and to send a call where its context says.

// policyName is what the service configuration calls it.
const policyName = "ringbatch_relay"

var registerOnce sync.Once

// register makes the balancer known to gRPC, whose registry is global. Which
// relay a balancer belongs to is told by the credentials of its connection.
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

// resolveInterval is how often the target is looked up again. gRPC does so by
// itself only when a connection fails: hosts that are added would get nothing.
// (More often than that its DNS resolver does not ask.)
const resolveInterval = 30 * time.Second

func (b *connections) keepResolving(ctx context.Context, interval time.Duration) {
	every(ctx, interval, func() { b.cc.ResolveNow(resolver.ResolveNowOptions{}) })
}

// connections are those of one relay.
type connections struct {
	cc    balancer.ClientConn
	hosts *hosts
	all   map[string]*connection // only gRPC's own, serialized, calls use it

	cancel context.CancelFunc // of keepResolving
}

type connection struct {
	sub  balancer.SubConn
	host *host
}

// nameOf is the address that a host is known by.
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
		//lint:ignore SA1019 there is no other way to connect; what is deprecated is several addresses
		sub, err := b.cc.NewSubConn(e.Addresses, balancer.NewSubConnOptions{StateListener: func(s balancer.SubConnState) { b.changed(c, s) }})
		if err != nil {
			return err
		}
		c.sub = sub
		b.all[name] = c
		sub.Connect()
	}
	if len(found) == 0 { // a name server's mistake, more often than not: hosts that work are kept
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

// changed is how gRPC tells of a connection.
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
	// A call whose connection ended between its choice and its sending waits for
	// a new picker, and would until its deadline.
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

// route is where a call goes, in its context, and what became of it.
type route struct {
	host *host
	sent atomic.Bool // bytes of it were sent: the host may have run it
}

type routeKey struct{}

// to makes a context for a call to one host.
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

// endpoints are a list of addresses, for gRPC's manual resolver.
func endpoints(list []string) (all []resolver.Endpoint) {
	for _, address := range slices.Compact(slices.Sorted(slices.Values(list))) {
		host, _, _ := net.SplitHostPort(address) // which checkAddresses has done before
		all = append(all, resolver.Endpoint{Addresses: []resolver.Address{{Addr: address, ServerName: host}}})
	}
	return all
}
