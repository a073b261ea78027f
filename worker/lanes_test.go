// SPDX-License-Identifier: Apache-2.0

package worker_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/worker"
)

func TestABatchThatIsNotFullGoesToAWorkerWithAFreeLane(t *testing.T) {
	r := newEagerRing(t, 8)
	cfg := r.config(2)
	cfg.Concurrency = 2
	w := r.attach(cfg)
	r.commit(1)
	first := next(t, w)
	r.commit(1)
	next(t, w).Complete() // although the first one runs and this one could grow
	first.Complete()
}

func TestAWorkerThatTakesLanesBackGetsNoMoreThanItAskedFor(t *testing.T) {
	r := newEagerRing(t, 1)
	cfg := r.config(4)
	cfg.Concurrency = 4
	w := r.attach(cfg)
	r.commit(6)
	b := next(t, w)
	w.Inside().SetLanes(1)
	b.Complete() // with this the broker learns of it
	for range 3 {
		next(t, w).Complete()
	}
	last := next(t, w)
	if b, err := w.Next(within(50 * time.Millisecond)); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("a second batch while the only lane is taken: %v, %v", b, err)
	}
	last.Complete()
	next(t, w).Complete()
}

func TestAFailureThatIsAStatusReachesTheClientAsThatStatus(t *testing.T) {
	r := newEagerRing(t, 8)
	w := r.attach(r.config(1))
	for _, c := range []struct {
		err  error
		want status.Code
		text string
	}{
		{fmt.Errorf("%w: two hosts died", status.ErrWorkerDied), status.ErrWorkerDied, "two hosts died"},
		{status.ErrQueueFull, status.ErrQueueFull, ""},
		{status.ErrShape, status.ErrFailed, status.ErrShape.Error()}, // no way for a request to end
		{errors.New("no such word"), status.ErrFailed, "no such word"},
	} {
		q := r.commit(1)[0]
		b := next(t, w)
		b.Fail(0, c.err)
		b.Complete()
		err := q.Wait(soon(t))
		if !errors.Is(err, c.want) || !strings.Contains(fmt.Sprint(err), c.text) {
			t.Errorf("failed with %q: %v", c.err, err)
		}
	}
}

func TestABatchHasItsLevelAndItsWaitingRequests(t *testing.T) {
	r := newRing(t, 2)
	must.Do(t, admin.New(r.socket).Set(soon(t), "m", policy.New(policy.Priorities(3))))
	c := r.dial()
	w := r.attach(r.config(1))
	send := func(level int, deadline time.Time) client.Request {
		q, err := c.Claim(soon(t), 1)
		if err == nil {
			err = q.SetPriority(level)
		}
		if err == nil && !deadline.IsZero() {
			err = q.SetDeadline(deadline)
		}
		if err == nil {
			err = q.Commit(context.Background())
		}
		must.Do(t, err)
		return q
	}
	send(2, time.Time{})
	var b *worker.Batch
	var hasty client.Request
	for limit := 20 * time.Millisecond; b == nil; limit *= 2 { // until both reach the worker in time
		hasty = send(1, time.Now().Add(limit))
		for ended := false; b == nil && !ended; {
			ended = !errors.Is(hasty.Poll(), status.ErrNotDone)
			b, _ = w.Next(within(5 * time.Millisecond))
		}
		if b != nil && b.Len() < 2 { // it expired on its way
			b.Complete()
			b = nil
			send(2, time.Time{})
		}
	}
	if b.Level() != 1 {
		t.Errorf("level %d, want that of the most urgent request, 1", b.Level())
	}
	must.Fail(t, "a request with a deadline of its own", hasty.Wait(soon(t)), status.ErrExpired)
	if open := []bool{b.Waiting(0), b.Waiting(1)}; open[0] == open[1] {
		t.Errorf("one of two has expired, open are %v", open)
	}
	b.Complete()
}

func TestABatchsContextEndsOnceNoClientWaits(t *testing.T) {
	r := newRing(t, 2)
	w := r.attach(r.config(1))
	reqs := r.commit(2)
	b := next(t, w)
	ctx, cancel := b.Context(soon(t))
	if _, ok := ctx.Deadline(); ok {
		t.Error("requests without a deadline have one")
	}
	must.Do(t, reqs[0].Cancel())
	ends(t, reqs[0], status.ErrCanceled)
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
