// SPDX-License-Identifier: Apache-2.0

package relay

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/balancer"
	"google.golang.org/grpc/resolver"

	"github.com/ringbatch/ringbatch/gateway/oip"
	"github.com/ringbatch/ringbatch/test/testlog"
)

func TestAHostsWindowFollowsWhatItReports(t *testing.T) {
	const ms = time.Millisecond
	for _, c := range []struct {
		name                 string
		queue, compute, took time.Duration
		fill                 float64
		grows, shrinks       bool
	}{
		{"it has nothing to do", ms, 10 * ms, 12 * ms, 0.1, true, false},
		{"one batch waits behind another", 10 * ms, 10 * ms, 21 * ms, 1, false, false},
		{"many wait", 30 * ms, 10 * ms, 41 * ms, 1, false, true},
		{"it waits, but not as long as the way takes", ms, ms / 10, 10 * ms, 1, false, false},
		{"its worker wakes up for full batches", ms / 10, ms / 100, ms, 1, true, false},
		{"its worker wakes up for batches that could be fuller", ms / 10, ms / 100, ms, 0.7, false, false},
		{"its worker wakes up for small batches", ms / 10, ms / 100, ms, 0.4, false, true},
	} {
		h := newHosts(slog.New(slog.DiscardHandler), 32).add("h")
		h.window, h.inFlight = 4, 4
		for range 10 {
			h.learnLoad(oip.Load{Queue: c.queue, Compute: c.compute}, true, c.took, c.fill)
		}
		if (h.window > 4) != c.grows || (h.window < 4) != c.shrinks {
			t.Errorf("%s: the window went from 4 to %.1f", c.name, h.window)
		}
	}
}

// usableHosts are hosts that can be chosen, by name.
func usableHosts(names ...string) (*hosts, map[string]*host) {
	p := newHosts(slog.New(slog.DiscardHandler), 32)
	byName := map[string]*host{}
	for _, name := range names {
		h := p.add(name)
		h.usable = true
		byName[name] = h
	}
	return p, byName
}

func TestWhyAHostIsLeftIsSaidOnce(t *testing.T) {
	log := &testlog.Log{}
	h := newHosts(slog.New(slog.NewTextHandler(log, nil)), 8).add("h")
	for i, c := range []struct {
		err  string
		says int // lines so far
	}{
		{"dial tcp 127.0.0.1:1: connect: connection refused", 1},
		{"dial tcp 127.0.0.1:1: connect: connection refused", 1},
		{"error reading server preface: remote error: tls: certificate required", 2},
		{"write tcp 127.0.0.1:40001->127.0.0.1:1: write: broken pipe", 2}, // seen in turns with the line before
		{"error reading server preface: remote error: tls: certificate required", 2},
		{"error reading server preface: raw-read tcp 127.0.0.1:40002->127.0.0.1:1: use of closed network connection", 3},
		{"error reading server preface: raw-read tcp 127.0.0.1:40003->127.0.0.1:1: use of closed network connection", 3},
		{"error reading server preface: http2: frame too large", 4},
	} {
		h.disconnected(errors.New(c.err))
		if n := strings.Count(log.String(), "host left"); n != c.says {
			t.Errorf("%d: %s: said %d times, want %d", i, c.err, n, c.says)
		}
	}
}

func TestABatchGoesToTheHostWithTheFewestThatHasRoom(t *testing.T) {
	p, all := usableHosts("a", "b", "c")
	all["a"].window, all["b"].window, all["c"].window = 2, 1, 1
	got := map[string]int{}
	var calls []*call
	for range 4 {
		c := p.choose(nil, nil)
		got[c.host.name]++
		calls = append(calls, c)
	}
	if got["a"] != 2 || got["b"] != 1 || got["c"] != 1 {
		t.Errorf("four batches went to %v, there is room for 2, 1 and 1", got)
	}
	calls[0].endCall()
	freed := calls[0].host
	if c := p.choose(nil, nil); c.host != freed {
		t.Errorf("%s has room again, the next went to %s", freed.name, c.host.name)
	}
	if c := p.choose([]*host{all["a"]}, nil); c.host.name == "a" {
		t.Error("a batch went back to the host that it comes from")
	}
}

func TestABatchGoesOnAtOnceOnlyToAHostThatItWasNotAt(t *testing.T) {
	p, all := usableHosts("a", "b", "c")
	all["c"].usable = false
	if been := []*host{all["a"]}; !p.others(been) {
		t.Error("b is left")
	}
	if been := []*host{all["a"], all["b"]}; p.others(been) {
		t.Error("only c is left, which cannot be used")
	}
}

func TestWhatAHostRefusedForItsSizeIsForgotten(t *testing.T) {
	h := newHosts(slog.New(slog.DiscardHandler), 8).add("h")
	h.tooLarge(1000, "")
	if n := h.mostBytes(h.learned.Add(sizeMemory - 1)); n != 500 {
		t.Errorf("it gets %d bytes, want half of what it refused", n)
	}
	if n := h.mostBytes(h.learned.Add(sizeMemory)); n != 0 {
		t.Errorf("it still gets no more than %d bytes", n)
	}
}

// asked signals each lookup of the target.
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
