// SPDX-License-Identifier: Apache-2.0

package client_test

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/test/testbed"
	"github.com/ringbatch/ringbatch/worker"
)

// budgeted is a model, or the last stage of a pipeline, whose batches cost at most 10.
type budgeted struct {
	t     *testing.T
	r     *ring
	c     *client.Client
	stage worker.Config
	sent  int
}

func newBudgeted(t *testing.T, pipeline bool) *budgeted {
	m := broker.ModelConfig{Signature: signature(t, []string{"x:u8[<=20]"}, []string{"y:i32[]"}),
		Policy: asks(policy.Slots(64), policy.Ragged(true))}
	limits := policy.New(policy.MaxBatchCost(10), policy.WaitTime(time.Hour))
	first := signature(t, []string{"x:u8[<=20]"}, []string{"h:i32[]"})
	last := signature(t, []string{"x:u8[<=20]", "h:i32[]"}, []string{"y:i32[]"})
	if pipeline {
		m.Stages = []broker.StageConfig{{Name: "first", Signature: first}, {Name: "last", Signature: last, Policy: limits}}
	} else {
		m.Policy = limits.Over(m.Policy)
	}
	b := &budgeted{t: t, r: newRing(t, m)}
	b.stage = worker.Config{Model: "m", Signature: m.Signature, Socket: b.r.socket,
		Policy: policy.New(policy.Ragged(true))}
	if pipeline {
		before := b.stage
		before.Model, before.Signature = "m/first", first
		b.r.broker.Serve(t, before, func(_ context.Context, b *worker.Batch) error { testbed.Touch(b); return nil })
		b.stage.Model, b.stage.Signature = "m/last", last
	}
	b.r.dial() // could always join, so that only full batches go out
	b.c = b.r.dial(client.WithWindow(32))
	return b
}

// send commits a row of a size and a cost, and waits until the model or the last stage has it.
func (b *budgeted) send(size, cost int) {
	b.t.Helper()
	req, err := b.c.Claim(soon(b.t), 1, size)
	must.Do(b.t, err)
	x, err := req.InputBytes(0)
	must.Do(b.t, err)
	x[0] = byte(b.sent)
	expect(b.t, "cost 65536", req.SetCost(65536), status.ErrInvalid)
	must.Do(b.t, errors.Join(req.SetCost(cost), req.Commit(soon(b.t))))
	expect(b.t, "cost after commit", req.SetCost(1), status.ErrCommitted)
	b.sent++
	for arrived := uint64(0); arrived < uint64(b.sent); time.Sleep(time.Millisecond) {
		s, err := admin.New(b.r.socket).Stats(soon(b.t))
		must.Do(b.t, err)
		arrived = s.Model(b.stage.Model).Requests
	}
}

// The sizes of rows, or the costs that a client gives, reach the batcher, whose scripts have the rest. A worker comes when all are sent.
func TestACostLimitsBatches(t *testing.T) {
	for _, place := range []string{"model", "stage"} {
		t.Run(place, func(t *testing.T) {
			b := newBudgeted(t, place == "stage")
			for _, size := range []int{3, 20, 5, 5} {
				b.send(size, 0)
			}
			for _, cost := range []int{3, 3, 3, 50} {
				b.send(20, cost)
			}
			w, err := worker.Attach(soon(t), b.stage)
			must.Do(t, err)
			defer w.Close()
			for k, want := range [][]int{{0}, {1}, {2, 3}, {4, 5, 6}, {7}} {
				batch := next(t, w)
				var got []int
				for i := range batch.Len() {
					got = append(got, int(batch.Input(0).Bytes(batch.Request(i).Row)[0]))
				}
				if !slices.Equal(got, want) {
					t.Fatalf("batch %d has %v, not %v", k, got, want)
				}
				must.Do(t, batch.Complete())
			}
		})
	}
}
