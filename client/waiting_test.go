// SPDX-License-Identifier: Apache-2.0

package client_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/worker"
)

// gated is a ring whose worker answers nothing before open is called.
func gated(t *testing.T) (r *ring, open func()) {
	t.Helper()
	r = newRing(t, plain(t))
	gate := make(chan struct{})
	open = sync.OnceFunc(func() { close(gate) })
	r.work(func(ctx context.Context, b *worker.Batch) error {
		<-gate
		return double(ctx, b)
	})
	t.Cleanup(open) // before the worker leaves
	return r, open
}

// send commits a request of one row.
func send(t *testing.T, c *client.Client) client.Request {
	t.Helper()
	q, err := c.Claim(soon(t), 1)
	if err == nil {
		err = q.Commit(context.Background())
	}
	must.Do(t, err)
	return q
}

func TestWaitingCallsEndWhenTheBrokerIsGone(t *testing.T) {
	r, open := gated(t)
	c := r.dial(client.WithWindow(10))
	var wg sync.WaitGroup
	for range 10 {
		q := send(t, c)
		wg.Go(func() {
			// Requests that the broker had not read when it began to drain end with Draining.
			if err := q.Wait(soon(t)); !errors.Is(err, status.ErrBrokerGone) && !errors.Is(err, status.ErrDraining) {
				t.Error(err)
			}
			must.Check(t, q.Release())
		})
	}
	r.stop()
	wg.Wait()
	open()
	r.start()
	q := send(t, c) // over the next attachment
	must.Check(t, errors.Join(q.Wait(soon(t)), q.Release()))
}

func TestAWaitEndsWithItsContextAndTheRequestGoesOn(t *testing.T) {
	r, open := gated(t)
	c := r.dial(client.WithWindow(4))
	first := send(t, c)
	var wg sync.WaitGroup
	for range 3 { // one leads, the others follow
		q := send(t, c)
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
			defer cancel()
			expect(t, "a short wait", q.Wait(ctx), context.DeadlineExceeded)
		})
	}
	wg.Wait()
	longest := make(chan error)
	go func() { longest <- first.Wait(t.Context()) }()
	open()
	expect(t, "the longest wait", <-longest, nil)
	expect(t, "another wait", first.Wait(soon(t)), nil)
}

func TestManyCancelsDoNotFlood(t *testing.T) {
	r := newRing(t, plain(t))
	r.work(double)
	c := r.dial(client.WithWindow(8))
	for range 2000 {
		q := send(t, c)
		must.Do(t, errors.Join(q.Cancel(), q.Cancel(), q.Cancel(), q.Release()))
	}
}

// "The broker went away; retry" alone would send somebody whose model is no
// longer declared to look at a broker that runs.
func TestAClientThatCannotAttachAgainSaysWhy(t *testing.T) {
	r := newRing(t, plain(t))
	c := r.dial(client.WithWindow(16))
	r.stop()
	claim := func() error {
		ctx, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
		defer cancel()
		_, err := c.Claim(ctx, 1)
		return err
	}
	says := func(want error) {
		t.Helper()
		var err error
		for end := time.Now().Add(patience); time.Now().Before(end); {
			if err = claim(); errors.Is(err, want) {
				break
			}
		}
		for _, e := range []error{want, status.ErrBrokerGone, context.DeadlineExceeded} {
			if !errors.Is(err, e) {
				t.Errorf("%v does not say: %v", err, e)
			}
		}
	}
	says(status.ErrNoBroker)
	was := r.model
	r.model.Policy = asks(policy.Slots(8))
	r.start()
	says(status.ErrRingFull)
	r.stop()
	r.model.Name = "other"
	r.start()
	says(status.ErrUnknownModel)
	r.stop()
	r.model = was
	r.start()
	req, err := c.Claim(soon(t), 1)
	must.Do(t, err)
	_ = req.Release()
}

func TestDialThatWaitsOutlastsABrokerThatDrains(t *testing.T) {
	r := newRing(t, plain(t))
	r.stop()
	r.broker.Config.DrainTime, r.broker.Config.WorkerGrace = patience, patience
	r.start()
	busy := r.dial()
	req, err := busy.Claim(soon(t), 1)
	if err == nil {
		err = req.Commit(soon(t)) // for no worker: it drains until this is released
	}
	must.Do(t, err)
	drained := make(chan struct{})
	go func() { defer close(drained); r.stop() }()
	for { // until it says so
		c, err := client.Dial(soon(t), "m", client.WithSocket(r.socket))
		if errors.Is(err, status.ErrDraining) {
			break
		}
		must.Do(t, err)
		c.Close()
	}
	dialled := make(chan error, 1)
	go func() {
		c, err := client.Dial(soon(t), "m", client.WithSocket(r.socket), client.WaitForModel())
		if err == nil {
			c.Close()
		}
		dialled <- err
	}()
	time.Sleep(20 * time.Millisecond) // so that it has asked; if not yet, no harm is done
	_ = req.Release()                 // which lets the broker end
	<-drained
	r.start()
	must.Check(t, <-dialled)
}

func TestAClientLearnsThePolicyOfTheBrokerThatCameBack(t *testing.T) {
	r := newRing(t, plain(t))
	c := r.dial(client.WithWindow(16))
	most := c.Model().MaxBatchSize
	for _, batch := range []int{most / 2, 16} { // fewer, then more than the first
		r.stop()
		r.model.Policy = asks(policy.MaxBatchSize(batch))
		r.start()
		for end := time.Now().Add(patience); c.Model().MaxBatchSize != batch && time.Now().Before(end); {
			time.Sleep(time.Millisecond)
		}
		req, err := c.Claim(soon(t), batch)
		if err != nil {
			t.Errorf("%d rows: %v", batch, err)
			continue
		}
		_ = req.Release()
		if _, err := c.Claim(soon(t), batch+1); err == nil {
			t.Errorf("%d rows of at most %d were claimed", batch+1, batch)
		}
	}
}
