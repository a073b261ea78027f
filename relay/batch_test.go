// SPDX-License-Identifier: Apache-2.0

package relay

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/gateway"
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
		b.eventually("the worker learns it", func() bool { return !b.batch.Waiting(0) })
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
				for until := time.Now().Add(patience); b.Waiting(i) && time.Now().Before(until); time.Sleep(time.Millisecond) {
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
	send := func(one, other byte) []client.Request {
		of := func(v byte) []any { return []any{tensor.Of("x", bytes.Repeat([]byte{v}, size), 1, size)} }
		return fill(t, c, of(one), of(other))
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
