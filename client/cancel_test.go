// SPDX-License-Identifier: Apache-2.0

package client_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/stats"
	"github.com/ringbatch/ringbatch/worker"
)

func modelStats(t *testing.T, r *ring) *stats.Model {
	t.Helper()
	s, err := admin.New(r.socket).Stats(soon(t))
	if err != nil {
		t.Fatal(err)
	}
	return &s.Models[0]
}

func waitQueued(t *testing.T, r *ring, n int) {
	t.Helper()
	end := time.Now().Add(patience)
	for modelStats(t, r).QueueLength != n {
		if time.Now().After(end) {
			t.Fatalf("%d queued, expected %d", modelStats(t, r).QueueLength, n)
		}
		time.Sleep(time.Millisecond)
	}
}

// taker is a worker that the test drives by hand, one batch at a time.
func (r *ring) taker(depth int) *worker.Worker {
	r.t.Helper()
	w, err := worker.Attach(soon(r.t), worker.Config{Model: "m", Signature: r.model.Signature, Socket: r.socket, Memory: r.mem, Depth: depth})
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(w.Close)
	return w
}

func next(t *testing.T, w *worker.Worker) *worker.Batch {
	t.Helper()
	b, err := w.Next(soon(t))
	if err != nil {
		t.Fatal(err)
	}
	b.Output(0) // as a worker that writes it
	return b
}

// nextUnlessEnded is next, and nil if the request ended in the queue.
func nextUnlessEnded(t *testing.T, w *worker.Worker, req client.Request) *worker.Batch {
	t.Helper()
	for end := time.Now().Add(patience); time.Now().Before(end); {
		ended := !errors.Is(req.Poll(), client.ErrNotDone) // what is dispatched after this has not
		b, err := w.NextFor(10 * time.Millisecond)
		if err == nil || ended {
			return b
		}
	}
	t.Fatal("the request has no end")
	return nil
}

func TestWhatIsCanceledInTheQueueNeverReachesAWorker(t *testing.T) {
	r := newRing(t, plain(t))
	c := r.dial(client.WithWindow(2))
	req := commitOne(t, c, 0)
	waitQueued(t, r, 1)
	short, cancel := context.WithCancel(context.Background())
	cancel()
	expect(t, "wait", req.Wait(short), client.ErrCanceled, context.Canceled)
	expect(t, "release", req.Release(), nil)
	waitQueued(t, r, 0)
	kept := commitOne(t, c, 0)
	w := r.taker(1)
	b := next(t, w)
	if b.Len() != 1 {
		t.Errorf("%d requests reached the worker", b.Len())
	}
	b.Complete()
	expect(t, "the other", kept.Wait(soon(t)), nil)
	if s := modelStats(t, r); s.Rows != 1 || s.Ended["Canceled"] != 1 {
		t.Errorf("%d rows, ended %v", s.Rows, s.Ended)
	}
}

func TestADeadlineIsKeptInTheQueueWithoutAWorker(t *testing.T) {
	r := newRing(t, plain(t))
	c := r.dial(client.WithWindow(1))
	for range 3 {
		short, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
		_, err := c.Infer(short, make([]float32, 4))
		expect(t, "infer", err, client.ErrExpired, context.DeadlineExceeded)
		cancel()
		back, err := c.Claim(soon(t), 1) // the slot comes back each time, when the broker has heard of it
		expect(t, "claim", errors.Join(err, back.Release()), nil)
	}
	past, cancel := context.WithTimeout(context.Background(), -time.Second)
	defer cancel()
	req, err := c.Claim(soon(t), 1)
	expect(t, "claim", err, nil)
	expect(t, "commit", req.Commit(past), nil)
	expect(t, "a deadline in the past", req.Wait(soon(t)), client.ErrExpired)
}

func TestWhatIsCanceledInAPostedBatchIsTakenOut(t *testing.T) {
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
	expect(t, "the canceled one", second[0].Wait(soon(t)), client.ErrCanceled)
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

func TestARunningRequestReleasesItsCallerAtOnceAndItsSlotLater(t *testing.T) {
	for _, how := range []string{"deadline", "release"} {
		t.Run(how, func(t *testing.T) {
			r := newRing(t, plain(t))
			c := r.dial(client.WithWindow(1))
			w := r.taker(2)
			var req client.Request
			var b *worker.Batch
			for limit := 300 * time.Millisecond; b == nil; limit *= 2 { // until it reaches the worker in time
				var err error
				req, err = c.Claim(soon(t), 1)
				expect(t, "claim", err, nil)
				ctx := soon(t)
				if how == "deadline" {
					short, cancel := context.WithTimeout(ctx, limit)
					defer cancel()
					ctx = short
				}
				expect(t, "commit", req.Commit(ctx), nil)
				if b = nextUnlessEnded(t, w, req); b == nil {
					expect(t, "release", req.Release(), nil)
				}
			}
			if how == "deadline" {
				expect(t, "wait", req.Wait(soon(t)), client.ErrExpired)
			}
			expect(t, "release", req.Release(), nil)
			if _, err := c.TryClaim(1); err == nil {
				t.Error("a slot that a worker may write into was claimed")
			}
			claimed := make(chan error, 1)
			go func() { // waits for the slot
				again, err := c.Claim(soon(t), 1)
				if err == nil {
					err = again.Release()
				}
				claimed <- err
			}()
			select {
			case err := <-claimed:
				t.Errorf("claimed before the worker was done: %v", err)
			case <-time.After(50 * time.Millisecond):
			}
			b.Complete()
			select {
			case err := <-claimed:
				expect(t, "claim", err, nil)
			case <-time.After(patience):
				t.Fatal("the slot did not come back")
			}
			leave := r.work(double)
			w.Close()
			_, err := c.Infer(soon(t), make([]float32, 4))
			expect(t, "the slot again", err, nil)
			leave()
		})
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
		if err != nil {
			t.Fatal(err)
		}
		expect(t, "commit", req.Commit(ctx), nil)
		if err := req.Wait(soon(t)); err == nil {
			ok++
		} else if !errors.Is(err, client.ErrOverloaded) { // the broker knows by now what a batch takes
			expect(t, "request", err, client.ErrExpired)
		}
		expect(t, "release", req.Release(), nil)
		cancel()
	}
	if s := modelStats(t, r); s.Offenders != 0 || s.Clients != 1 {
		t.Errorf("%d offenders, %d clients", s.Offenders, s.Clients)
	}
	t.Logf("%d of 400 in time", ok)
}

// The window of a closed client goes to another only when nobody can write
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
	expect(t, "the one in flight", queued.Wait(soon(t)), client.ErrBrokerGone)
	expect(t, "release", queued.Release(), nil)
	dial := func() error {
		next, err := client.Dial(soon(t), "m", client.WithSocket(r.socket), client.WithMemory(r.mem), client.WithWindow(32))
		if err == nil {
			next.Close()
		}
		return err
	}
	expect(t, "while it may write", dial(), client.ErrRingFull)
	clear(x)
	expect(t, "release", claimed.Release(), nil)
	for end := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
		if err = dial(); err == nil || time.Now().After(end) {
			break
		}
	}
	expect(t, "after it", err, nil)
}
