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
	t        *testing.T
	r        *ring
	c        *client.Client
	stage    worker.Config
	cost     int              // that the next requests give
	requests []client.Request // by number
	ended    map[int]error    // how some requests end; the others succeed
}

func newBudgeted(t *testing.T, pipeline bool) *budgeted {
	m := broker.ModelConfig{Signature: signature(t, []string{"x:u8[<=20]"}, []string{"y:i32[]"}),
		Policy: asks(policy.Slots(64), policy.Ragged(true), policy.Priorities(2), policy.DefaultPriority(1))}
	limits := policy.New(policy.MaxBatchCost(10), policy.WaitTime(time.Hour))
	first := signature(t, []string{"x:u8[<=20]"}, []string{"h:i32[]"})
	last := signature(t, []string{"x:u8[<=20]", "h:i32[]"}, []string{"y:i32[]"})
	if pipeline {
		m.Stages = []broker.StageConfig{{Name: "first", Signature: first}, {Name: "last", Signature: last, Policy: limits}}
	} else {
		m.Policy = limits.Over(m.Policy)
	}
	b := &budgeted{t: t, r: newRing(t, m), ended: map[int]error{}}
	b.stage = worker.Config{Model: "m", Signature: m.Signature, Socket: b.r.socket,
		Policy: policy.New(policy.Ragged(true))}
	if pipeline {
		before := b.stage
		before.Model, before.Signature = "m/first", first
		end := testbed.ServeLocal(before, func(_ context.Context, b *worker.Batch) error { testbed.Touch(b); return nil })
		t.Cleanup(func() { must.Do(t, end()) })
		b.stage.Model, b.stage.Signature = "m/last", last
	}
	b.r.dial() // could always join, so that only full batches go out
	b.c = b.r.dial(client.WithWindow(32))
	return b
}

// send commits a row of a size, and waits until the model or the last stage has it.
func (b *budgeted) send(ctx context.Context, size, level int) client.Request {
	b.t.Helper()
	req, err := b.c.Claim(ctx, 1, size)
	must.Do(b.t, err)
	x, err := req.InputBytes(0)
	must.Do(b.t, err)
	x[0] = byte(len(b.requests))
	expect(b.t, "cost 65536", req.SetCost(65536), status.ErrInvalid)
	must.Do(b.t, errors.Join(req.SetPriority(level), req.SetCost(b.cost), req.Commit(ctx)))
	expect(b.t, "cost after commit", req.SetCost(1), status.ErrCommitted)
	b.requests = append(b.requests, req)
	for arrived := uint64(0); arrived < uint64(len(b.requests)); time.Sleep(time.Millisecond) {
		s, err := admin.New(b.r.socket).Stats(soon(b.t))
		must.Do(b.t, err)
		arrived = s.Model(b.stage.Model).Requests
	}
	return req
}

func (b *budgeted) sendSizes(sizes ...int) {
	b.t.Helper()
	for _, size := range sizes {
		b.send(soon(b.t), size, 1)
	}
}

// The requests wait in the queue until all are sent. Then a worker takes them.
func TestACostLimitsBatchesBesideEverythingElse(t *testing.T) {
	for _, x := range []struct {
		name  string
		fails int // batches that the worker fails
		send  func(b *budgeted)
		want  [][]int // numbers of the requests in each batch
	}{
		{"a row above the budget runs alone", 0, func(b *budgeted) { b.sendSizes(3, 20, 5, 5) }, [][]int{{0}, {1}, {2, 3}}},
		{"costs that clients give", 0, func(b *budgeted) {
			b.cost = 3
			b.sendSizes(20, 1, 1, 1)
			b.cost = 50
			b.sendSizes(1)
		}, [][]int{{0, 1, 2}, {3}, {4}}},
		{"priorities", 0, func(b *budgeted) {
			b.sendSizes(6, 4, 1)
			b.send(soon(b.t), 9, 0)
			b.sendSizes(9)
		}, [][]int{{3}, {0, 1}, {2, 4}}},
		{"deadlines", 0, func(b *budgeted) {
			ctx, cancel := context.WithTimeout(soon(b.t), 300*time.Millisecond)
			defer cancel()
			b.ended[0] = status.ErrExpired
			expect(b.t, "after its deadline", b.send(ctx, 6, 1).Wait(soon(b.t)), status.ErrExpired)
			b.sendSizes(6, 4)
		}, [][]int{{1, 2}}},
		{"cancellation", 0, func(b *budgeted) {
			b.sendSizes(2, 6, 1)
			must.Do(b.t, b.requests[1].Cancel())
			b.ended[1] = status.ErrCanceled
			b.sendSizes(7)
		}, [][]int{{0, 2, 3}}},
		{"retries", 1, func(b *budgeted) { b.sendSizes(1, 1, 1, 1, 6) }, [][]int{{0, 1, 2, 3, 4}, {0, 1}, {2, 3}, {4}}},
	} {
		for _, place := range []string{"model", "stage"} {
			t.Run(x.name+"/"+place, func(t *testing.T) {
				b := newBudgeted(t, place == "stage")
				x.send(b)
				w, err := worker.Attach(soon(t), b.stage)
				must.Do(t, err)
				defer w.Close()
				for k, want := range x.want {
					batch := next(t, w)
					var got []int
					for i := range batch.Len() {
						got = append(got, int(batch.Input(0).Bytes(batch.Request(i).Row)[0]))
					}
					if !slices.Equal(got, want) {
						t.Fatalf("batch %d has %v, not %v", k, got, want)
					}
					if k < x.fails {
						batch.FailAll(errors.New("as the test wants it"))
					}
					must.Do(t, batch.Complete())
				}
				for i, req := range b.requests {
					if err := req.Wait(soon(t)); !errors.Is(err, b.ended[i]) {
						t.Errorf("request %d: %v, not %v", i, err, b.ended[i])
					}
				}
			})
		}
	}
}
