// SPDX-License-Identifier: Apache-2.0

package relay

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	rpcstatus "google.golang.org/grpc/status"

	"github.com/ringbatch/ringbatch/gateway/core"
	"github.com/ringbatch/ringbatch/gateway/oip"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/test/testbed"
	"github.com/ringbatch/ringbatch/worker"
)

func TestWhatAnUnavailableHostMeansForABatch(t *testing.T) {
	for _, c := range []struct {
		text    string
		trailer metadata.MD
		sent    bool
		want    outcome
		full    bool
	}{
		{"connection refused", nil, false, waits, false},
		{"error reading from server: EOF", nil, true, lost, false},
		{"in words that may change", metadata.Pairs(oip.NotRunTrailer, "Draining"), true, waits, false},
		{"the broker that ran it is shutting down, or not ready", nil, true, lost, false},
		{"[request id: 7] Exceeds maximum queue size", nil, true, waits, true},
	} {
		_, byName := usableHosts("h")
		h := byName["h"]
		h.window = 4
		x := &exchange{sending: &sending{call: &call{host: h}}, ctx: context.Background(), requests: []int{0}, trailer: c.trailer}
		res := (&trip{}).failed(x, rpcstatus.Error(codes.Unavailable, c.text), c.sent)
		if res.outcome != c.want || len(res.again) != 1 || errors.Is(res.err, status.ErrQueueFull) != c.full || (h.window < 4) != c.full {
			t.Errorf("%s: %+v, window %v", c.text, res, h.window)
		}
	}
}

// A single short deadline does not mean that the host is overloaded.
func TestAHostIsOverloadedIfItRefusesHalfOfAMessage(t *testing.T) {
	for refusals, shrinks := range map[int]bool{0: false, 1: false, 3: false, 4: true, 8: true} {
		_, byName := usableHosts("h")
		h := byName["h"]
		h.window = 4
		requests, failed := []int{0, 1, 2, 3, 4, 5, 6, 7}, map[int]failure{}
		for _, i := range requests[:refusals] {
			failed[i] = failure{status.ErrOverloaded.Name(), "it could not be answered in time"}
		}
		res := (&trip{ended: make([]bool, len(requests))}).answered(h, requests, failed)
		if len(res.again) != refusals || (h.window < 4) != shrinks {
			t.Errorf("%d of 8 refused: %d go on, window %v", refusals, len(res.again), h.window)
		}
	}
}

func TestAClientMayRetryABatchThatNoHostHasRun(t *testing.T) {
	full, timeout := fmt.Errorf("%w: h has no room", status.ErrQueueFull), errors.New("other: context deadline exceeded")
	refusal := result{refused, []int{0}, full}
	for what, c := range map[string]struct{ err, want error }{
		"refused, then out of time":               {(&trip{last: full}).late(nil, false), status.ErrQueueFull},
		"refused, then out of time at another":    {(&trip{last: full}).late(timeout, false), status.ErrQueueFull},
		"refused by all":                          {(&trip{}).spent(refusal), status.ErrQueueFull},
		"refused after a lost host":               {(&trip{begun: true}).spent(refusal), status.ErrFailed},
		"out of time at a host":                   {(&trip{}).late(timeout, true), timeout},
		"refused, then out of time at a host":     {(&trip{last: full}).late(timeout, true), timeout},
		"out of time at a host is the host's end": {(&trip{last: full}).late(timeout, true), status.ErrFailed},
	} {
		if !errors.Is(c.err, c.want) || c.want != status.ErrQueueFull && errors.Is(c.err, status.ErrQueueFull) {
			t.Errorf("%s: %v, want %v", what, c.err, c.want)
		}
	}
}

func TestABatchThatAHostMayHaveRunIsNotSentAgainAfterARefusal(t *testing.T) {
	b := take(t)
	hosts, byName := usableHosts("a", "b")
	trip := b.trip(hosts)
	trip.r.cfg.Attempts = DefaultAttempts
	over, cancel := context.WithCancel(context.Background())
	cancel()
	fails := func(h *host, code codes.Code) (suspects []int) {
		ctx, cancel := context.WithCancelCause(context.Background())
		s := &sending{t: trip, ctx: ctx, groups: [][]int{{0}}}
		hosts.mu.Lock()
		s.call = h.beginCall(cancel)
		hosts.mu.Unlock()
		s.first = &exchange{sending: s, ctx: ctx, cancel: cancel, requests: s.groups[0], route: &route{host: h}, err: rpcstatus.Error(code,
			"in a test")}
		s.first.route.sent.Store(true)
		trip.first = s
		return trip.deliver(over, s.groups[0], lossesAlone)
	}
	if suspects := fails(byName["a"], codes.Unavailable); len(suspects) != 1 {
		t.Fatalf("of the host that went away: %v", suspects)
	}
	if suspects := fails(byName["b"], codes.ResourceExhausted); len(suspects) != 0 || !errors.Is(trip.last, status.ErrQueueFull) {
		t.Fatalf("of the host that refused it: %v, %v", suspects, trip.last)
	}
	b.batch.Complete()
	if err := b.q.Wait(soon(t)); !errors.Is(err, status.ErrFailed) || errors.Is(err, status.ErrQueueFull) {
		t.Errorf("it ended with %v", err)
	}
}

// leaving is a gateway of an older release that is about to go.
type leaving struct {
	t *testing.T
	older
	calls *atomic.Int32
}

func (l leaving) ModelInfer(ctx context.Context, _ *oip.ModelInferRequest) (*oip.ModelInferResponse, error) {
	l.calls.Add(1)
	must.Do(l.t, grpc.SetTrailer(ctx, metadata.Pairs(oip.NotRunTrailer, "Draining")))
	return nil, rpcstatus.Error(codes.Unavailable, "the gateway is shutting down")
}

// It gets the requests by their shapes, and so in another order; the next host gets them all in one message.
func TestRequestsThatComeBackByShapeKeepTheirInputs(t *testing.T) {
	sig := signature(t, "x:u8[<=4] z:u8[1]", "y:u8[1]")
	h := newHost(t, sig, func(_ context.Context, b *worker.Batch) error {
		for i := range b.Len() {
			row := b.Request(i).Row
			b.Output(0).Bytes(row)[0] = b.Input(0).Bytes(row)[0] + b.Input(1).Bytes(row)[0]
		}
		return nil
	}, nil)
	var calls atomic.Int32
	first := standBefore(t, h, func(b before) oip.GRPCInferenceServiceServer { return leaving{t, older{b}, &calls} })
	l := newLocal(t, func(c *Config) {
		c.Inputs = sig.Inputs
		c.Policy = policy.New(policy.MaxBatchSize(3), policy.WaitTime(patience), policy.Slots(64), policy.Ragged(true))
	}, first, h.address)
	c := l.dial()
	l.eventually("the one that leaves had requests", func() bool {
		var requests [][]any
		for i, n := range []int{2, 3, 2} {
			requests = append(requests, []any{tensor.Of("x", bytes.Repeat([]byte{byte(10 * (i + 1))}, n), 1, n),
				tensor.Of("z", []byte{byte(i + 1)}, 1, 1)})
		}
		for i, q := range fill(t, c, requests...) {
			must.Do(t, q.Wait(soon(t)))
			if out, err := q.OutputBytes(0); err != nil || out[0] != byte(11*(i+1)) {
				t.Errorf("request %d: %v, %v", i, out, err)
			}
			_ = q.Release()
		}
		return calls.Load() > 0
	})
}

// full refuses a batch some times.
type full struct {
	before
	refusal error
	name    string // for oip.NotRunTrailer; "": none
	times   int

	mu    sync.Mutex
	calls []time.Time
}

func (f *full) ModelInfer(ctx context.Context, r *oip.ModelInferRequest) (*oip.ModelInferResponse, error) {
	f.mu.Lock()
	f.calls = append(f.calls, time.Now())
	refuses := len(f.calls) <= f.times
	f.mu.Unlock()
	if refuses {
		_ = grpc.SetTrailer(ctx, metadata.Pairs(oip.NotRunTrailer, f.name))
		return nil, f.refusal
	}
	return f.behind.ModelInfer(ctx, r)
}

// Only that it waits for too short a time is wrong: a busy machine cannot do that.
func TestABatchThatAHostHasNoRoomForWaits(t *testing.T) {
	for name, refusal := range map[string]error{
		"Refused": rpcstatus.Error(codes.ResourceExhausted, "this caller would have more than 1000 bytes in flight, try again"),
		"":        rpcstatus.Error(codes.Unavailable, "in ensemble 'm', [request id: <id_unknown>] Exceeds maximum queue size"),
	} {
		t.Run(name, func(t *testing.T) {
			h := newHost(t, signature(t, "x:i32[1]", "y:i32[1]"), double, nil)
			f := &full{refusal: refusal, name: name, times: 2 * DefaultAttempts}
			l := newLocal(t, nil, standBefore(t, h, func(b before) oip.GRPCInferenceServiceServer { f.before = b; return f }))
			q := commit(t, l.dial(), 4)[0]
			if err := q.Wait(soon(t)); err != nil || number(t, q) != 8 {
				t.Fatal(err)
			}
			f.mu.Lock()
			defer f.mu.Unlock()
			least := leastWait * (1<<f.times - 1) // it doubles each time
			if took := f.calls[f.times].Sub(f.calls[0]); took < least {
				t.Errorf("it was sent %d times in %v, want %v at least", len(f.calls), took, least)
			}
		})
	}
}

func TestABatchThatAHostNeverTakesIsNotTriedAgain(t *testing.T) {
	nothing := func(_ context.Context, b *worker.Batch) error { testbed.Touch(b); return nil }
	h := newHost(t, signature(t, "x:u8[2000]", "y:u8[1]"), nothing, func(c *core.Config) { c.CallerBytes = 1000 })
	l := newLocal(t, nil, h.address)
	q, err := l.dial().Claim(soon(t), 1)
	must.Do(t, err)
	if err = q.Commit(soon(t)); err == nil {
		err = q.Wait(soon(t))
	}
	if err == nil || errors.Is(err, status.ErrQueueFull) || !strings.Contains(err.Error(), "--caller-bytes") {
		t.Fatalf("%v", err)
	}
}

// How full batches are is a matter of load, and must not decide which of them end well.
func TestABatchThatIsTooLargeForAHostGoesThereInParts(t *testing.T) {
	sig := signature(t, "x:u8[<=4000]", "y:u8[<=4000]")
	for name, limit := range map[string]func(*core.Config){
		"gRPC's":     func(c *core.Config) { c.MaxMessageBytes = 3000 },
		"a caller's": func(c *core.Config) { c.CallerBytes = 3000 },
	} {
		t.Run(name, func(t *testing.T) {
			h := newHost(t, sig, func(_ context.Context, b *worker.Batch) error {
				for i := range b.Len() {
					n := int(b.Request(i).Dims()[0])
					if err := b.SetOutputDims(i, n); err != nil {
						return err
					}
					copy(b.Output(0).Bytes(b.Request(i).Row)[:n], b.Input(0).Bytes(b.Request(i).Row)[:n])
				}
				return nil
			}, limit)
			l := newLocal(t, func(c *Config) {
				c.Policy = policy.New(policy.MaxBatchSize(8), policy.WaitTime(0), policy.Slots(64), policy.Ragged(true))
			}, h.address)
			c := l.dial()
			sizes := []int{1000, 10, 3500, 1001, 1002, 1003, 700, 2000} // one is too large alone
			var requests [][]any
			for i, n := range sizes {
				requests = append(requests, []any{tensor.Of("x", bytes.Repeat([]byte{byte(i)}, n), 1, n)})
			}
			list := fill(t, c, requests...)
			for i, n := range sizes {
				switch err := list[i].Wait(soon(t)); {
				case n > 3000:
					if err == nil || !strings.Contains(err.Error(), "larger than it takes") {
						t.Errorf("%d bytes: %v", n, err)
					}
				case err != nil:
					t.Errorf("%d bytes: %v", n, err)
				default:
					if out, err := list[i].Output("y"); err != nil || out.Shape[1] != n ||
						!bytes.Equal(out.Data[:n], bytes.Repeat([]byte{byte(i)}, n)) {
						t.Errorf("%d bytes: another answer, of shape %v; %v", n, out.Shape, err)
					}
				}
			}
		})
	}
}

// generous is a gateway of an older release whose model answers more than it declares.
type generous struct {
	older
	calls atomic.Int32
}

func (g *generous) ModelInfer(ctx context.Context, r *oip.ModelInferRequest) (*oip.ModelInferResponse, error) {
	g.calls.Add(1)
	a, err := g.older.ModelInfer(ctx, r)
	if err == nil && bytes.Contains(r.RawInputContents[0], []byte{66}) {
		a.RawOutputContents = [][]byte{make([]byte, 2*oip.MaxMetaBytes)}
	}
	return a, err
}

func TestAnAnswerThatIsTooLargeIsNotTakenForARefusal(t *testing.T) {
	h := newHost(t, signature(t, "x:i32[1]", "y:i32[1]"), double, nil)
	g := &generous{}
	l := newLocal(t, func(c *Config) {
		c.Policy = policy.New(policy.MaxBatchSize(4), policy.WaitTime(patience), policy.Slots(64))
	}, standBefore(t, h, func(b before) oip.GRPCInferenceServiceServer { g.older = older{b}; return g }))
	c := l.dial()
	for _, q := range commit(t, c, 2, 4, 6, 66) {
		if err := q.Wait(soon(t)); err == nil || !strings.Contains(err.Error(), "its answer is larger than") {
			t.Error(err)
		}
	}
	for _, q := range commit(t, c, 2, 4, 6, 8) {
		must.Check(t, q.Wait(soon(t)))
	}
	if n := g.calls.Load(); n != 2 {
		t.Errorf("two batches were sent in %d messages", n)
	}
}
