// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"context"
	"fmt"
	"log/slog"
	"math"
	"runtime/debug"
	"sync"

	"github.com/ringbatch/ringbatch/shm"
)

// Func runs one batch: it reads the inputs and writes the outputs in place.
// The inputs are not its own to change (see Batch.Input). An error, a panic, or an
// output that it never asked for fails the batch as a whole (Batch.FailAll), and the
// worker goes on. Single requests fail by Batch.Fail. The batch is completed
// when Func returns.
//
// ctx ends when the worker is to stop. The batch is waited for all the same.
type Func func(ctx context.Context, b *Batch) error

// Serve attaches and runs fn for every batch until ctx ends, attaching again
// whenever the broker is restarted (see KeepAttached). With cfg.Concurrency
// several calls run at once, each in a goroutine of its own, and complete in
// any order. Batches that are running when ctx ends are finished first. Serve
// returns nil after ctx ended, or the error that ended it.
func Serve(ctx context.Context, cfg Config, fn Func) error {
	return KeepAttached(ctx, cfg, func(ctx context.Context, w *Worker) error {
		return w.ServeBatches(ctx, max(1, cfg.Concurrency), fn)
	})
}

// server runs batches on several goroutines. They take turns at the mailbox:
// the one that took a batch runs it, another waits for the next.
type server struct {
	w    *Worker
	fn   Func
	turn sync.Mutex // at the mailbox
	err  error      // why there are no more batches; guarded by turn
}

// ServeBatches runs fn for every batch of one attachment, in as many goroutines,
// until ctx ends or the broker goes away. Serve is KeepAttached and this.
func (w *Worker) ServeBatches(ctx context.Context, goroutines int, fn Func) error {
	stop := context.AfterFunc(ctx, w.poke) // once, not for every batch
	defer stop()
	// A taker that spins, or sleeps past the scheduler, could keep the others
	// from the core they need to finish.
	w.parker.Polite = goroutines > 1
	s := &server{w: w, fn: fn}
	var others sync.WaitGroup
	for range goroutines - 1 {
		others.Go(func() { s.run(ctx) })
	}
	s.run(ctx)
	others.Wait()
	return s.err
}

func (s *server) run(ctx context.Context) {
	defer shm.AskShortSlice()()
	for {
		b := s.take(ctx)
		if b == nil {
			return
		}
		if err := call(ctx, b, s.fn); err != nil {
			b.FailAll(err)
		}
		_ = b.Complete() // its error is the requests' too
		s.w.recycle(b)
	}
}

// take waits for its turn and for a batch; nil if there will be none.
func (s *server) take(ctx context.Context) *Batch {
	s.turn.Lock()
	defer s.turn.Unlock()
	if s.err == nil {
		s.err = ctx.Err()
	}
	if s.err != nil {
		return nil
	}
	var b *Batch
	if b, s.err = s.w.await(ctx, math.MaxInt64); b != nil {
		b.kept = true // even if fn completes it by itself, it is ours until fn returns
	}
	return b
}

// call calls fn and turns a panic into an error.
func call(ctx context.Context, b *Batch, fn Func) (err error) {
	defer func() {
		if p := recover(); p != nil {
			slog.Error("worker function panicked", "panic", p, "stack", string(debug.Stack()))
			err = fmt.Errorf("worker function panicked: %v", p)
		}
	}()
	return fn(ctx, b)
}
