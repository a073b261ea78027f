// SPDX-License-Identifier: Apache-2.0

package worker_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/status"
)

func TestABatchsContextEndsOnceNobodyWaits(t *testing.T) {
	r := newRing(t, 2)
	w := r.attach(r.config(1))
	reqs := r.commit(2)
	b := next(t, w)
	ctx, cancel := b.Context(soon(t))
	if _, ok := b.Deadline(); ok {
		t.Error("requests without a deadline have one")
	}
	must.Do(t, reqs[0].Cancel())
	ends(t, reqs[0], client.ErrCanceled)
	if b.Waiting(0) || !b.Waiting(1) || ctx.Err() != nil {
		t.Errorf("after one of two was canceled: %v, %v, %v", b.Waiting(0), b.Waiting(1), ctx.Err())
	}
	must.Do(t, reqs[1].Cancel())
	<-ctx.Done()
	if !errors.Is(context.Cause(ctx), status.ErrCanceled) {
		t.Errorf("ended with %v", context.Cause(ctx))
	}
	cancel()
	b.Complete()
}

func TestABatchsContextEndsWithItsLastDeadline(t *testing.T) {
	r := newRing(t, 2)
	w := r.attach(r.config(1))
	var at []time.Time
	for _, d := range []time.Duration{time.Hour, 2 * time.Hour} {
		ctx, cancel := context.WithTimeout(soon(t), d)
		defer cancel()
		end, _ := ctx.Deadline()
		at = append(at, end)
		req, err := r.client.Claim(ctx, 1)
		must.Do(t, err)
		must.Do(t, req.Commit(ctx))
	}
	b := next(t, w)
	ctx, cancel := b.Context(context.Background())
	if got, ok := ctx.Deadline(); !ok || got.Before(at[1].Add(-time.Minute)) || got.After(at[1].Add(time.Minute)) {
		t.Errorf("deadline %v, %v; expected %v", got, ok, at[1])
	}
	cancel()
	if ctx.Err() == nil {
		t.Error("cancel did not end it")
	}
	b.Complete()
}
