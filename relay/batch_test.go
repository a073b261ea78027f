// SPDX-License-Identifier: Apache-2.0

package relay

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	rpcstatus "google.golang.org/grpc/status"

	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/gateway"
	"github.com/ringbatch/ringbatch/gateway/oip"
	"github.com/ringbatch/ringbatch/internal/testbed"
	"github.com/ringbatch/ringbatch/internal/testlog"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/worker"
)

// taken is a batch of one request that a worker has taken, for a trip without Run.
type taken struct {
	*local
	batch    *worker.Batch
	settings policy.Settings
	q        client.Request
}

func take(t *testing.T) *taken {
	t.Helper()
	b := &taken{local: &local{t: t, mem: shm.NewHeap(), log: &testlog.Log{}}}
	var err error
	if b.broker, err = testbed.StartLocal(broker.Config{Memory: b.mem, DrainTime: time.Millisecond}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = b.broker.Close() })
	w, err := worker.Attach(soon(t), worker.Config{Model: "m", Signature: signature(t, "x:i32[1]", "y:i32[1]"), Socket: b.broker.Socket(), Memory: b.mem, Policy: policy.New(policy.WaitTime(0))})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(w.Close)
	b.q = commit(t, b.dial(), 2)[0]
	if b.batch, err = w.Next(soon(t)); err != nil {
		t.Fatal(err)
	}
	b.settings = w.Settings()
	return b
}

// trip is the batch's, with these hosts and no connection to them.
func (b *taken) trip(p *hosts) *trip {
	r := &relay{log: slog.New(slog.NewTextHandler(b.log, nil)), hosts: p, posted: map[*exchange]struct{}{}}
	return newTrip(r, b.batch, &b.settings)
}

func TestAFaultOfTheRelayFailsItsBatchAndNothingElse(t *testing.T) {
	b := take(t)
	hosts, byName := usableHosts(LeastRequest, "h")
	trip := b.trip(hosts) // sending panics
	trip.start()
	if h := byName["h"]; h.inFlight != 0 || len(h.calls) != 0 || len(trip.r.posted) != 0 {
		t.Errorf("the host still has %d calls of it (%d to cancel), %d are watched", h.inFlight, len(h.calls), len(trip.r.posted))
	}
	trip.finish()
	if err := b.q.Wait(soon(t)); !errors.Is(err, status.ErrFailed) || !strings.Contains(err.Error(), "the relay panicked: ") {
		t.Errorf("it ended with %v", err)
	}
	if n := strings.Count(b.log.String(), "the relay panicked"); n != 1 {
		t.Errorf("it was sent %d times", n)
	}
}

func TestARequestWithoutAnAnswerNeverEndsWell(t *testing.T) {
	t.Run("a fault of ours", func(t *testing.T) {
		b := take(t)
		b.trip(nil).failUnanswered()
		b.batch.Complete()
		if err := b.q.Wait(soon(t)); !errors.Is(err, status.ErrFailed) || !strings.Contains(err.Error(), errNoAnswer.Error()) {
			t.Errorf("it ended with %v", err)
		}
	})
	t.Run("the broker is gone", func(t *testing.T) {
		b := take(t)
		if err := b.broker.Stop(); err != nil {
			t.Fatal(err)
		}
		b.eventually("the worker learns it", func() bool { return !b.batch.Open(0) })
		trip := b.trip(newHosts(slog.New(slog.DiscardHandler), LeastRequest, 8))
		trip.start()
		trip.finish()
		if err := b.q.Wait(soon(t)); !errors.Is(err, status.ErrBrokerGone) {
			t.Errorf("it ended with %v", err)
		}
	})
}

func TestAPartIsAnsweredAlsoWhenNobodyWaitsForTheOneBefore(t *testing.T) {
	const first, second, size = 77, 78, 2000
	running := make(chan struct{})
	begin := sync.OnceFunc(func() { close(running) })
	h := newHost(t, signature(t, "x:u8[2000]", "y:u8[2000]"), func(_ context.Context, b *worker.Batch) error {
		for i := range b.Len() {
			in := b.Input(0).Bytes(b.Request(i).Row)
			if in[0] == first {
				begin()
				for until := time.Now().Add(patience); b.Open(i) && time.Now().Before(until); time.Sleep(time.Millisecond) {
				}
			}
			copy(b.Output(0).Bytes(b.Request(i).Row), in)
		}
		return nil
	}, func(c *gateway.Config) { c.MaxMessageBytes = 3000 })
	l := newLocal(t, func(c *Config) {
		c.Policy = policy.New(policy.MaxBatchSize(2), policy.WaitTime(patience), policy.Slots(64))
	}, h.address)
	c := l.dial()
	send := func(values ...byte) (list []client.Request) {
		for _, v := range values {
			q, err := c.Fill(soon(t), tensor.Of("x", bytes.Repeat([]byte{v}, size), 1, size))
			if err != nil {
				t.Fatal(err)
			}
			list = append(list, q)
		}
		if err := client.CommitAll(soon(t), list); err != nil {
			t.Fatal(err)
		}
		return list
	}
	for _, q := range send(1, 2) { // the relay learns how much the host takes
		if err := q.Wait(soon(t)); err != nil {
			t.Fatal(err)
		}
	}
	list := send(first, second)
	<-running
	if err := list[0].Cancel(); err != nil {
		t.Fatal(err)
	}
	if err := list[1].Wait(soon(t)); err != nil {
		t.Fatal(err)
	}
	if out, err := list[1].OutputBytes(0); err != nil || !bytes.Equal(out, bytes.Repeat([]byte{second}, size)) {
		t.Errorf("another answer, which begins with %d; %v", out[0], err)
	}
}

func TestWhatAnUnavailableHostMeansForABatch(t *testing.T) {
	for _, c := range []struct {
		text string
		sent bool
		want fate
		full bool
	}{
		{"connection refused", false, waits, false},
		{"error reading from server: EOF", true, lost, false},
		{"the gateway is shutting down", true, waits, false},
		{"[request id: 7] Exceeds maximum queue size", true, waits, true},
	} {
		_, byName := usableHosts(LeastRequest, "h")
		h := byName["h"]
		h.window = 4
		x := &exchange{sending: &sending{call: &call{host: h}}, ctx: context.Background(), requests: []int{0}}
		res := (&trip{}).failed(x, rpcstatus.Error(codes.Unavailable, c.text), c.sent)
		if res.fate != c.want || len(res.again) != 1 || errors.Is(res.err, status.ErrQueueFull) != c.full || (h.window < 4) != c.full {
			t.Errorf("%s: %+v, window %v", c.text, res, h.window)
		}
	}
}

func TestARefusedBatchWhoseTimeIsOverMayBeSentAgain(t *testing.T) {
	trip := &trip{last: fmt.Errorf("%w: h has no room", status.ErrQueueFull)}
	for _, now := range []error{nil, errors.New("h: context deadline exceeded")} {
		if err := trip.late(now); !errors.Is(err, status.ErrQueueFull) {
			t.Errorf("%v: %v", now, err)
		}
	}
}

// leaving is a gateway of an older release that is about to go.
type leaving struct {
	older
	calls *atomic.Int32
}

func (l leaving) ModelInfer(context.Context, *oip.ModelInferRequest) (*oip.ModelInferResponse, error) {
	l.calls.Add(1)
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
	first := standBefore(t, h, func(b before) oip.GRPCInferenceServiceServer { return leaving{older{b}, &calls} })
	l := newLocal(t, func(c *Config) {
		c.Route, c.Inputs = Fill, sig.Inputs
		c.Policy = policy.New(policy.MaxBatchSize(3), policy.WaitTime(patience), policy.Slots(64), policy.Ragged(true))
	}, first, h.address)
	c := l.dial()
	l.eventually("the one that leaves had requests", func() bool {
		var list []client.Request
		for i, n := range []int{2, 3, 2} {
			q, err := c.Fill(soon(t), tensor.Of("x", bytes.Repeat([]byte{byte(10 * (i + 1))}, n), 1, n), tensor.Of("z", []byte{byte(i + 1)}, 1, 1))
			if err != nil {
				t.Fatal(err)
			}
			list = append(list, q)
		}
		if err := client.CommitAll(soon(t), list); err != nil {
			t.Fatal(err)
		}
		for i, q := range list {
			if err := q.Wait(soon(t)); err != nil {
				t.Fatal(err)
			}
			if out, err := q.OutputBytes(0); err != nil || out[0] != byte(11*(i+1)) {
				t.Errorf("request %d: %v, %v", i, out, err)
			}
			_ = q.Release()
		}
		return calls.Load() > 0
	})
}
