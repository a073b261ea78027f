// SPDX-License-Identifier: Apache-2.0

package relay

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/client/ringbatchtest"
	"github.com/ringbatch/ringbatch/gateway"
	"github.com/ringbatch/ringbatch/gateway/core"
	"github.com/ringbatch/ringbatch/gateway/oip"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/test/testbed"
	"github.com/ringbatch/ringbatch/test/testlog"
	"github.com/ringbatch/ringbatch/worker"
)

// patience is for what surely comes, on any machine.
const patience = 2 * time.Minute

func soon(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

// testHost is a broker, a gateway and workers in this process, as another host
// would have them.
type testHost struct {
	t       *testing.T
	broker  *ringbatchtest.Broker
	address string
	stop    func() // ends the gateway
}

func signature(t testing.TB, in, out string) tensor.Signature {
	t.Helper()
	sig, err := tensor.ParseSignature(strings.Fields(in), strings.Fields(out))
	must.Do(t, err)
	return sig
}

func newHost(t *testing.T, sig tensor.Signature, fn worker.Func, change func(*core.Config)) *testHost {
	t.Helper()
	h := &testHost{t: t}
	slots := 2048 // a gateway asks for many
	if sig.Inputs[0].RowBytes() > 1<<10 {
		slots = 64
	}
	h.broker = testbed.StartOnHeap(t, broker.Config{DrainTime: time.Millisecond, Models: []broker.ModelConfig{{
		Name: "m", Signature: sig, Policy: policy.New(policy.MaxBatchSize(8), policy.WaitTime(0), policy.Slots(slots),
			policy.Priorities(3)),
	}}})
	h.broker.Serve(t, worker.Config{Model: "m", Signature: sig}, fn)
	h.serve(change)
	t.Cleanup(func() { h.stop() })
	return h
}

// serve opens the gateway, at the same address as before if there was one.
func (h *testHost) serve(change func(*core.Config)) {
	h.t.Helper()
	// Not 127.0.0.1: connections of this machine have ports of that one, and would
	// keep the gateway from opening its own again.
	cfg := core.Config{Socket: h.broker.Socket(), HTTP: core.Off, GRPC: "127.0.0.2:0",
		Logger: slog.New(slog.DiscardHandler), DrainTime: 50 * time.Millisecond}
	if h.address != "" {
		cfg.GRPC = h.address
	}
	if change != nil {
		change(&cfg)
	}
	started := make(chan struct{})
	cfg.Started = func(_, rpc net.Addr) { h.address = rpc.String(); close(started) }
	g, err := core.New(cfg)
	must.Do(h.t, err)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- gateway.New(g).Serve(ctx) }()
	select {
	case <-started:
	case err := <-ended:
		h.t.Fatal(err)
	}
	var once sync.Once
	h.stop = func() { once.Do(func() { cancel(); <-ended }) }
}

// local is this host: a broker, a relay and a client.
type local struct {
	t      *testing.T
	broker *ringbatchtest.Broker
	log    *testlog.Log
}

// newLocal starts a broker, and a relay to the hosts.
func newLocal(t *testing.T, change func(*Config), addresses ...string) *local {
	t.Helper()
	l := &local{t: t, log: &testlog.Log{}}
	l.broker = testbed.StartOnHeap(t, broker.Config{DrainTime: time.Millisecond})
	cfg := Config{Model: "m", Target: strings.Join(addresses, ","), Socket: l.broker.Socket(), WaitForBroker: patience,
		Logger: slog.New(slog.NewTextHandler(l.log, nil)), CheckInterval: 20 * time.Millisecond, CheckTimeout: patience / 3,
		Policy: policy.New(policy.WaitTime(0), policy.Slots(64), policy.Priorities(3))}
	if change != nil {
		change(&cfg)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- Run(ctx, cfg) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("relay: %v", err)
		}
		if t.Failed() {
			t.Log(l.log.String())
		}
	})
	return l
}

func (l *local) dial() *client.Client {
	l.t.Helper()
	c, err := client.Dial(soon(l.t), "m", client.WithSocket(l.broker.Socket()), client.WithWindow(32),
		client.WaitForModel())
	must.Do(l.t, err)
	l.t.Cleanup(func() { c.Close() })
	return c
}

func (l *local) eventually(what string, f func() bool) {
	l.t.Helper()
	if err := testbed.Eventually(patience, func() error {
		if !f() {
			return errors.New("not yet")
		}
		return nil
	}); err != nil {
		l.t.Fatalf("%s: %v", what, err)
	}
}

// commit sends requests of one number each, together.
func commit(t *testing.T, c *client.Client, numbers ...int32) (list []client.Request) {
	t.Helper()
	for _, v := range numbers {
		q, err := c.Claim(soon(t), 1)
		must.Do(t, err)
		in, err := q.InputBytes(0)
		must.Do(t, err)
		binary.LittleEndian.PutUint32(in, uint32(v))
		list = append(list, q)
	}
	must.Do(t, client.CommitAll(context.Background(), list))
	return list
}

// number is a request's answer.
func number(t *testing.T, q client.Request) int32 {
	t.Helper()
	out, err := q.OutputBytes(0)
	must.Do(t, err)
	return int32(binary.LittleEndian.Uint32(out))
}

// double answers twice the number; odd ones fail alone.
func double(_ context.Context, b *worker.Batch) error {
	for i := range b.Len() {
		for row := b.Request(i).Row; row < b.Request(i).Row+b.Request(i).Rows; row++ {
			v := worker.Row[int32](b.Input(0), row)[0]
			if v%2 != 0 {
				b.Fail(i, fmt.Errorf("%d is odd", v))
			}
			worker.Row[int32](b.Output(0), row)[0] = 2 * v
		}
	}
	return nil
}

// before stands before a host, and passes a relay's calls on.
type before struct {
	oip.UnimplementedGRPCInferenceServiceServer
	behind oip.GRPCInferenceServiceClient
}

func (b before) ServerMetadata(ctx context.Context, r *oip.ServerMetadataRequest) (*oip.ServerMetadataResponse, error) {
	return b.behind.ServerMetadata(ctx, r)
}

func (b before) ModelMetadata(ctx context.Context, r *oip.ModelMetadataRequest) (*oip.ModelMetadataResponse, error) {
	return b.behind.ModelMetadata(ctx, r) // without the header
}

func (b before) ModelConfig(ctx context.Context, r *oip.ModelConfigRequest) (*oip.ModelConfigResponse, error) {
	return b.behind.ModelConfig(ctx, r)
}

func (b before) ModelReady(ctx context.Context, r *oip.ModelReadyRequest) (*oip.ModelReadyResponse, error) {
	return b.behind.ModelReady(ctx, r)
}

// standBefore serves what stands before a host, and gives its address.
func standBefore(t *testing.T, h *testHost, made func(before) oip.GRPCInferenceServiceServer) (address string) {
	t.Helper()
	conn, err := grpc.NewClient(h.address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	must.Do(t, err)
	t.Cleanup(func() { conn.Close() })
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must.Do(t, err)
	server := grpc.NewServer()
	oip.RegisterGRPCInferenceServiceServer(server, made(before{behind: oip.NewGRPCInferenceServiceClient(conn)}))
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(server.Stop)
	return listener.Addr().String()
}

// older is a gateway of a release that knows nothing of relays: it takes a batch
// as one request.
type older struct{ before }

func (o older) ServerMetadata(ctx context.Context, r *oip.ServerMetadataRequest) (*oip.ServerMetadataResponse, error) {
	m, err := o.behind.ServerMetadata(ctx, r)
	if err == nil {
		m.Extensions = slices.DeleteFunc(m.Extensions, func(s string) bool { return s == oip.RequestsParameter })
		m.Version = "0.0.1"
	}
	return m, err
}

func (o older) ModelInfer(ctx context.Context, r *oip.ModelInferRequest) (*oip.ModelInferResponse, error) {
	if r.Parameters[oip.RequestsParameter] != nil {
		return nil, errors.New("a parameter that an older release does not know")
	}
	return o.behind.ModelInfer(ctx, r)
}

// fill sends requests with these inputs each, together.
func fill(t *testing.T, c *client.Client, requests ...[]any) (list []client.Request) {
	t.Helper()
	for _, inputs := range requests {
		q, err := c.Fill(soon(t), inputs...)
		must.Do(t, err)
		list = append(list, q)
	}
	must.Do(t, client.CommitAll(soon(t), list))
	return list
}
