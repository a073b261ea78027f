// SPDX-License-Identifier: Apache-2.0

// Package relay compares a relay with bare gRPC that sends the same messages, and one host with two and four. The hosts are
// processes of this machine.
package relay

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/ringbatch/ringbatch/bench/gateway"
	"github.com/ringbatch/ringbatch/bench/rig"
	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/test/testbed"
)

// Aims: docs/relay.md.
const (
	aimLarge   = 0.75 // of bare gRPC's bytes/s, 32 × 602,112 bytes
	aimSmall   = 5.0  // × the requests/s of 64 callers one by one, 64 bytes
	aimLatency = 2.0  // × a bare unary call, one caller
	aimTwo     = 1.9  // × the throughput of one host
	aimFour    = 3.6

	batch     = 32
	producers = 64
	slowCost  = 20 * time.Millisecond // a batch of the model "slow" takes as long as a GPU might
)

var small, large = gateway.Sizes[0], gateway.Sizes[1]

// Roles of this suite's processes, which also uses the roles of the gateway suite.
func Roles() testbed.Roles { return testbed.Roles{"relay producer": testbed.With(producerRole)} }

// Run is `bench relay`.
func Run(ctx context.Context, args []string, out io.Writer) error {
	s := rig.Suite{Name: "relay", About: "A relay beside bare gRPC with the same messages, and what further hosts add; see docs/relay.md.",
		Rounds: 5, Round: time.Second}
	for _, part := range []struct {
		name    string
		measure func(*bed)
	}{{"large", measureLarge}, {"small", measureSmall}, {"one", measureOne}, {"hosts", measureHosts}} {
		s.Parts = append(s.Parts, rig.Part{Name: part.name, Run: func(r *rig.Rig) {
			b := &bed{Rig: r}
			_, b.local = r.StartBroker("local.sock")
			_, at := gateway.StartBare(r)
			b.bare = at.GRPC
			part.measure(b)
		}})
	}
	return s.Run(ctx, args, out)
}

// bed is the processes: this host's broker and relays, the far hosts, and the bare server.
type bed struct {
	*rig.Rig
	local string // socket
	bare  string // address
}

func echoJob(socket, model string, s gateway.Size, most int) rig.EchoJob {
	in, out := fmt.Sprintf("u8[%d]", s.Bytes), fmt.Sprintf("u8[%d]", s.Answer)
	return rig.EchoJob{Socket: socket, Model: model, In: in, Out: out, MaxBatch: most}
}

// farHost starts a broker with a worker and a gateway, and returns its address.
func (b *bed) farHost(name string, job rig.EchoJob) string {
	_, job.Socket = b.StartBroker(name + ".sock")
	b.StartEcho(job)
	return b.Find(b.StartProgram(job.Socket, "gateway", "--http", "off", "--grpc", "127.0.0.1:0"), "grpc ")
}

// relay serves a model of those hosts here.
func (b *bed) relay(model, remote string, hosts ...string) {
	b.Find(b.StartProgram(b.local, "relay", model, "--remote-model", remote, "--to", strings.Join(hosts, ",")), "relaying ")
}

// ringCallers are n clients of the ring here, each of that many goroutines.
func (b *bed) ringCallers(model string, n, goroutines int, s gateway.Size) (all []rig.Caller) {
	for range n {
		call, err := ringCaller(b.Context(), b.local, model, goroutines, s)
		b.Must(err)
		for range goroutines {
			all = append(all, call)
		}
	}
	return all
}

func ringCaller(ctx context.Context, socket, model string, window int, s gateway.Size) (rig.Caller, error) {
	wait, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	c, err := client.Dial(wait, model, client.WithSocket(socket), client.WithWindow(window), client.WaitForModel())
	if err != nil {
		return nil, err
	}
	input := rig.Pattern(s.Bytes)
	return func(ctx context.Context) error { return rig.Ask(ctx, c, input) }, nil
}

func measureLarge(b *bed) {
	b.relay(large.Model, large.Model, b.farHost("far", echoJob("", large.Model, large, batch)))
	ring := b.ringCallers(large.Model, producers, 1, large)
	var bare []rig.Caller
	for range 3 {
		conn, err := gateway.Dial(b.bare)
		b.Must(err)
		defer conn.Close()
		bare = append(bare, gateway.RPCCaller(conn, large, batch))
	}
	t := b.Compare("large", bare, ring)
	bareMB, ringMB := t[0].PerSecond*batch*float64(large.Bytes)/1e6, t[1].PerSecond*float64(large.Bytes)/1e6
	b.Check("large batches", ringMB/bareMB, ">=", aimLarge,
		"602,112 bytes, batches of 32: relay %.0f MB/s, bare gRPC with the same messages %.0f MB/s", ringMB, bareMB)
}

// producerJob is a process that sends small requests, to the ring and to the bare server in turns.
type producerJob struct {
	Socket, Bare string
}

// The kinds of calls that a producer makes.
const (
	bareKind  = "bare"  // unary calls to the bare server
	relayKind = "small" // a request of the ring whose worker is the relay
	localKind = "local" // of a ring whose worker is on this host: the limit of a relay
)

type producerOrder struct {
	Kind string
	For  time.Duration
}

func producerRole(c *testbed.Child, job producerJob) error {
	conn, err := gateway.Dial(job.Bare)
	if err != nil {
		return err
	}
	calls := map[string]rig.Caller{bareKind: gateway.RPCCaller(conn, small, 1)}
	for _, kind := range []string{relayKind, localKind} {
		if calls[kind], err = ringCaller(c.Context(), job.Socket, kind, 1, small); err != nil {
			return err
		}
	}
	return testbed.Serve(c, func(o producerOrder) (rig.Turn, error) {
		return rig.Call(c.Context(), []rig.Caller{calls[o.Kind]}, o.For)
	})
}

// produce measures small requests of n producer processes: bare, through the relay, and at a worker of this host.
func (b *bed) produce(n int) []rig.Turn {
	b.relay(relayKind, small.Model, b.farHost("far", echoJob("", small.Model, small, producers)))
	b.StartEcho(echoJob(b.local, localKind, small, producers))
	procs := b.MustStartAll(n, func(int) testbed.Spec {
		return testbed.Spec{Role: "relay producer", Job: producerJob{Socket: b.local, Bare: b.bare}, Procs: 2}
	})
	var kinds []func(time.Duration) (rig.Turn, error)
	for _, kind := range []string{bareKind, relayKind, localKind} {
		kinds = append(kinds, func(d time.Duration) (sum rig.Turn, err error) {
			var medians []float64
			for _, t := range rig.OrderAll[rig.Turn](b.Rig, procs, producerOrder{kind, d}) {
				sum.PerSecond += t.PerSecond
				medians = append(medians, t.MedianUS)
			}
			sum.MedianUS = rig.Median(medians)
			return sum, nil
		})
	}
	return b.CompareTurns(fmt.Sprintf("%d producers", n), kinds...)
}

func measureSmall(b *bed) {
	t := b.produce(producers)
	b.Check("small requests", t[1].PerSecond/t[0].PerSecond, ">=", aimSmall,
		"64 bytes, %d producers: relay %.0f requests/s, gRPC %.0f (a ring with its worker here: %.0f)",
		producers, t[1].PerSecond, t[0].PerSecond, t[2].PerSecond)
}

func measureOne(b *bed) {
	t := b.produce(1)
	b.Check("one caller", t[1].MedianUS/t[0].MedianUS, "<=", aimLatency,
		"64 bytes, 1 caller: relay %.0f µs, bare unary call %.0f µs (a ring with its worker here: %.0f µs)",
		t[1].MedianUS, t[0].MedianUS, t[2].MedianUS)
}

func measureHosts(b *bed) {
	var hosts []string
	for i := range 4 {
		job := echoJob("", "slow", small, batch)
		job.Cost = slowCost
		hosts = append(hosts, b.farHost(fmt.Sprint("far", i), job))
	}
	var rates []float64
	for _, n := range []int{1, 2, 4} {
		model := fmt.Sprintf("slow%d", n)
		b.relay(model, "slow", hosts[:n]...)
		t := b.Compare(fmt.Sprintf("%d hosts", n), b.ringCallers(model, 12, batch, small))
		rates = append(rates, t[0].PerSecond)
	}
	text := fmt.Sprintf("simulated cost, %v a batch of %d: 1, 2, 4 hosts %.0f, %.0f, %.0f requests/s", slowCost, batch, rates[0], rates[1],
		rates[2])
	b.Check("two hosts", rates[1]/rates[0], ">=", aimTwo, "%s", text)
	b.Check("four hosts", rates[2]/rates[0], ">=", aimFour, "%s", text)
}
