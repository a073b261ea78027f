// SPDX-License-Identifier: Apache-2.0

package client_test

import (
	"context"
	"errors"
	"math"
	"sync"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/internal/must"
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
	t.Cleanup(open) // before the worker is told to leave
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

func TestThoseWhoWaitAreToldThatTheBrokerIsGone(t *testing.T) {
	r, open := gated(t)
	c := r.dial(client.WithWindow(10))
	var wg sync.WaitGroup
	for range 10 {
		q := send(t, c)
		wg.Go(func() {
			// What it had not read yet when it was told to stop ends with Draining.
			if err := q.Wait(soon(t)); !errors.Is(err, client.ErrBrokerGone) && !errors.Is(err, client.ErrDraining) {
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

func TestWaitForEndsInTimeAndTheRequestGoesOn(t *testing.T) {
	r, open := gated(t)
	c := r.dial(client.WithWindow(4))
	first := send(t, c)
	var wg sync.WaitGroup
	for range 3 { // one leads, the others follow
		q := send(t, c)
		wg.Go(func() { expect(t, "a short wait", q.WaitFor(20*time.Millisecond), client.ErrTimeout) })
	}
	wg.Wait()
	longest := make(chan error)
	go func() { longest <- first.WaitFor(math.MaxInt64) }() // no clock goes that far
	open()
	expect(t, "the longest wait", <-longest, nil)
	expect(t, "another wait", first.WaitFor(patience), nil)
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
