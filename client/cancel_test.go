// SPDX-License-Identifier: Apache-2.0

package client_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/admin/stats"
	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/test/testbed"
	"github.com/ringbatch/ringbatch/worker"
)

func modelStats(t *testing.T, r *ring) *stats.Model {
	t.Helper()
	s, err := admin.New(r.socket).Stats(soon(t))
	must.Do(t, err)
	return &s.Models[0]
}

// taker is a worker that the test drives by hand, one batch at a time.
func (r *ring) taker(depth int) *worker.Worker {
	r.t.Helper()
	w, err := worker.Attach(soon(r.t), worker.Config{Model: "m", Signature: r.model.Signature, Socket: r.socket,
		Depth: depth})
	must.Do(r.t, err)
	r.t.Cleanup(w.Close)
	return w
}

func next(t *testing.T, w *worker.Worker) *worker.Batch {
	t.Helper()
	b, err := w.Next(soon(t))
	must.Do(t, err)
	testbed.Touch(b)
	return b
}

func TestACanceledRequestIsTakenOutOfAPostedBatch(t *testing.T) {
	m := plain(t)
	m.Policy = asks(policy.MaxBatchSize(2), policy.WaitTime(time.Hour))
	r := newRing(t, m)
	r.dial() // somebody who could join: only full batches go out
	c := r.dial(client.WithWindow(8))
	w := r.taker(2)
	first := []client.Request{commitOne(t, c, 0), commitOne(t, c, 0)}
	running := next(t, w)
	// A second, full batch is posted while the first runs.
	second := []client.Request{commitOne(t, c, 0), commitOne(t, c, 0)}
	posted := func() bool { s := modelStats(t, r); return s.Batches == 2 }
	for end := time.Now().Add(patience); !posted(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the second batch was not posted")
		}
	}
	expect(t, "cancel", second[0].Cancel(), nil)
	expect(t, "the canceled one", second[0].Wait(soon(t)), status.ErrCanceled)
	running.Complete()
	b := next(t, w)
	if b.Len() != 1 || b.Rows() != 1 {
		t.Errorf("%d requests, %d rows", b.Len(), b.Rows())
	}
	b.Complete()
	for _, req := range append(first, second[1]) {
		expect(t, "the others", req.Wait(soon(t)), nil)
	}
}

// A Claim that began to wait before anything was abandoned must notice slots
// that are given up later.
func TestAWaitingClaimNoticesSlotsThatAreGivenUp(t *testing.T) {
	r := newRing(t, plain(t))
	c := r.dial(client.WithWindow(2))
	first, second := commitOne(t, c, 0), commitOne(t, c, 0) // no worker: both stay queued
	claimed := make(chan error, 1)
	go func() {
		req, err := c.Claim(soon(t), 2)
		if err == nil {
			err = req.Release()
		}
		claimed <- err
	}()
	time.Sleep(20 * time.Millisecond)
	expect(t, "release", first.Release(), nil)
	expect(t, "release", second.Release(), nil)
	select {
	case err := <-claimed:
		expect(t, "claim", err, nil)
	case <-time.After(patience):
		t.Fatal("the claim waits for ever")
	}
}

// An answer that comes at the same moment as the deadline must not make the
// client an offender when it uses the slot again.
func TestAnAnswerThatRacesWithItsDeadlineIsNoOffence(t *testing.T) {
	r := newRing(t, plain(t))
	r.work(func(ctx context.Context, b *worker.Batch) error {
		time.Sleep(200 * time.Microsecond)
		return double(ctx, b)
	})
	c := r.dial(client.WithWindow(1))
	ok := 0
	for i := range 400 {
		ctx, cancel := context.WithTimeout(context.Background(), time.Duration(100+i*5)*time.Microsecond)
		req, err := c.Claim(soon(t), 1)
		must.Do(t, err)
		expect(t, "commit", req.Commit(ctx), nil)
		if err := req.Wait(soon(t)); err == nil {
			ok++
		} else if !errors.Is(err, status.ErrOverloaded) { // the broker knows the cost of a batch by now
			expect(t, "request", err, status.ErrExpired)
		}
		expect(t, "release", req.Release(), nil)
		cancel()
	}
	if s := modelStats(t, r); s.Offenders != 0 || s.Clients != 1 {
		t.Errorf("%d offenders, %d clients", s.Offenders, s.Clients)
	}
	t.Logf("%d of 400 in time", ok)
}

// The window of a closed client goes to another only when no worker can write
// into it any more.
func TestAClosedClientKeepsItsWindowUntilItsLastRequestIsReleased(t *testing.T) {
	r := newRing(t, plain(t))
	c := r.dial(client.WithWindow(32))
	claimed, err := c.Claim(soon(t), 1)
	expect(t, "claim", err, nil)
	queued := commitOne(t, c, 0)
	x, err := claimed.InputBytes(0)
	expect(t, "input", err, nil)
	expect(t, "close", c.Close(), nil)
	expect(t, "the one in flight", queued.Wait(soon(t)), status.ErrBrokerGone)
	expect(t, "release", queued.Release(), nil)
	dial := func() error {
		next, err := client.Dial(soon(t), "m", client.WithSocket(r.socket), client.WithWindow(32))
		if err == nil {
			next.Close()
		}
		return err
	}
	expect(t, "while it may write", dial(), status.ErrRingFull)
	clear(x)
	expect(t, "release", claimed.Release(), nil)
	for end := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
		if err = dial(); err == nil || time.Now().After(end) {
			break
		}
	}
	expect(t, "after it", err, nil)
}
