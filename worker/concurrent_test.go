// SPDX-License-Identifier: Apache-2.0

package worker_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/test/testbed"
	"github.com/ringbatch/ringbatch/worker"
)

// double answers, a row to a goroutine; requests that begin with a negative
// number fail alone.
func double(_ context.Context, b *worker.Batch) error {
	var all sync.WaitGroup
	for i := range b.Len() {
		all.Go(func() {
			q := b.Request(i)
			x := worker.Row[int32](b.Input(0), q.Row)
			if x[0] < 0 {
				b.Fail(i, fmt.Errorf("%d is negative", x[0]))
				return
			}
			for row := q.Row; row < q.Row+q.Rows; row++ {
				x, y := worker.Row[int32](b.Input(0), row), worker.Row[int32](b.Output(0), row)
				y[0], y[1] = 2*x[0], 2*x[1]
			}
		})
	}
	all.Wait()
	return nil
}

// askMany sends requests from several clients and goroutines and checks every answer.
func askMany(t *testing.T, r *ring, clients, goroutines, requests int) {
	t.Helper()
	var all sync.WaitGroup
	for k := range clients {
		c, err := client.Dial(soon(t), "m", client.WithSocket(r.socket), client.WithWindow(8))
		must.Do(t, err)
		defer c.Close()
		for g := range goroutines {
			all.Go(func() {
				for i := range requests {
					v := int32(1 + k*10000 + g*1000 + i)
					if i%7 == 6 {
						v = -v
					}
					outs, err := c.Infer(soon(t), []int32{v, v + 1})
					if v < 0 {
						if want := fmt.Sprintf("%d is negative", v); !errors.Is(err, status.ErrFailed) || err.Error() != want {
							t.Errorf("%d ended with %v", v, err)
						}
						continue
					}
					if err != nil {
						t.Error(err)
						return
					}
					if y, _ := tensor.As[int32](outs[0]); y[0] != 2*v || y[1] != 2*v+2 {
						t.Errorf("%d became %v", v, y)
					}
				}
			})
		}
	}
	all.Wait()
}

func TestBatchesRunAtOnceAndCompleteInAnyOrder(t *testing.T) {
	r := newEagerRing(t, 4)
	cfg := r.config(0)
	cfg.Concurrency = 8
	var running, most atomic.Int32
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() {
		served <- worker.Serve(ctx, cfg, func(ctx context.Context, b *worker.Batch) error {
			if n := running.Add(1); n > most.Load() {
				most.Store(n)
			}
			defer running.Add(-1)
			time.Sleep(time.Duration(rand.IntN(2000)) * time.Microsecond)
			if b.ID()%5 == 0 { // some functions answer early
				defer b.Complete()
			}
			return double(ctx, b)
		})
	}()
	askMany(t, r, 4, 6, 40)
	cancel()
	must.Check(t, <-served)
	if most.Load() < 2 {
		t.Error("never did two batches run at once")
	}
}

func TestConcurrencyIsTheNumberOfBatchesAtOnce(t *testing.T) {
	r := newRing(t, 1)
	cfg := r.config(0)
	cfg.Concurrency = 5
	var come sync.WaitGroup
	come.Add(cfg.Concurrency)
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() {
		served <- worker.Serve(ctx, cfg, func(_ context.Context, b *worker.Batch) error {
			testbed.Touch(b)
			come.Done()
			come.Wait() // all five at once, or never
			cancel()    // and all are finished first
			return nil
		})
	}()
	for _, req := range r.commit(cfg.Concurrency) {
		ends(t, req, nil)
	}
	must.Check(t, <-served)
}

func TestAnyGoroutineCompletesWhileAnotherTakes(t *testing.T) {
	r := newEagerRing(t, 3)
	w := r.attach(r.config(16))
	ctx, cancel := context.WithCancel(context.Background())
	var all sync.WaitGroup
	all.Go(func() {
		var completing sync.WaitGroup
		defer completing.Wait()
		for {
			b, err := w.Next(ctx)
			if err != nil {
				return
			}
			completing.Go(func() {
				time.Sleep(time.Duration(rand.IntN(500)) * time.Microsecond)
				_ = double(ctx, b)
				b.Complete()
			})
		}
	})
	askMany(t, r, 4, 6, 40)
	cancel()
	all.Wait()
}

// The first of both answers, and only once.
func TestCloseAndCompleteMayMeet(t *testing.T) {
	r := newRing(t, 1)
	for range 20 {
		w := r.attach(r.config(8))
		reqs := r.commit(8)
		var all sync.WaitGroup
		start := make(chan struct{})
		for range reqs {
			b := next(t, w)
			all.Go(func() {
				<-start
				b.Complete()
			})
		}
		close(start)
		w.Inside().Leave() // not Close, which says that no batch is in use any more
		all.Wait()
		for _, req := range reqs {
			if err := req.Wait(soon(t)); err != nil && err.Error() != "the worker was closed before it ran this request" {
				t.Errorf("ended with %v", err)
			}
			_ = req.Release()
		}
		w.Close()
	}
}

func TestABrokerThatGoesWhileBatchesRunIsAttachedToAgain(t *testing.T) {
	r := newEagerRing(t, 1)
	cfg := r.config(0)
	cfg.Concurrency = 4
	ctx, cancel := context.WithCancel(context.Background())
	entered, open := make(chan struct{}, 8), make(chan struct{})
	served := make(chan error, 1)
	go func() {
		served <- worker.Serve(ctx, cfg, func(ctx context.Context, b *worker.Batch) error {
			if worker.Row[int32](b.Input(0), 0)[0] == 0 {
				entered <- struct{}{}
				<-open
				if err := testbed.Eventually(patience, func() error { // it has to hear of that
					if b.Waiting(0) {
						return errors.New("somebody still waits for a request of a broker that is gone")
					}
					return nil
				}); err != nil {
					t.Error(err)
				}
			}
			return double(ctx, b)
		})
	}()
	held := r.commit(1)
	<-entered
	r.restart(sig)
	ends(t, held[0], status.ErrBrokerGone) // before an answer can come
	close(open)
	askMany(t, r, 2, 2, 20)
	cancel()
	must.Check(t, <-served)
}

// The worker may hear of the broker's end before the client does.
func TestRequestsOfALostBrokerMayBeSentAgain(t *testing.T) {
	r := newRing(t, 1)
	for range 10 {
		w := r.attach(r.config(1))
		reqs := r.commit(1)
		b := next(t, w)
		r.restart(sig)
		if err := testbed.Eventually(patience, func() error {
			if b.Waiting(0) {
				return errors.New("the worker has not heard of it")
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		w.Close()
		ends(t, reqs[0], status.ErrBrokerGone)
	}
}

func TestPaddingOfBatchesThatRunAtOnceIsTheirOwn(t *testing.T) {
	r := newEagerRing(t, 2)
	cfg := r.config(0)
	cfg.Concurrency, cfg.Pad, cfg.PadTo = 6, "fixed", 4
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() {
		served <- worker.Serve(ctx, cfg, func(ctx context.Context, b *worker.Batch) error {
			for i := b.Rows(); i < b.PadTo(); i++ {
				if x := worker.Row[int32](b.Input(0), i); x[0] != 0 {
					t.Errorf("padding is %v", x)
				}
				y := worker.Row[int32](b.Output(0), i)
				y[0], y[1] = int32(b.ID()), int32(i)
			}
			return double(ctx, b)
		})
	}()
	askMany(t, r, 4, 4, 20)
	cancel()
	must.Check(t, <-served)
}
