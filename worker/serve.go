// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"context"
	"fmt"
	"log/slog"
	"runtime/debug"
	"sync"

	"github.com/ringbatch/ringbatch/shm"
)

// Func runs one batch, which is completed when it returns. An error or a panic is
// FailAll. ctx ends when the worker should stop; Serve waits for the running batch even
// then.
type Func func(ctx context.Context, b *Batch) error

// Serve attaches (see KeepAttached) and runs fn for every batch until ctx ends; then it
// finishes the running batches and returns nil.
func Serve(ctx context.Context, cfg Config, fn Func) error {
	return KeepAttached(ctx, cfg, func(ctx context.Context, w *Worker) error {
		return w.serve(ctx, max(1, cfg.Concurrency), fn)
	})
}

// server runs batches on several goroutines. They take turns at the mailbox: a goroutine
// that took a batch runs it, and another goroutine waits for the next batch.
type server struct {
	w    *Worker
	fn   Func
	turn sync.Mutex // at the mailbox
	err  error      // why there are no more batches; guarded by turn
}

// serve runs fn, in a number of goroutines, for every batch of one attachment, until ctx
// ends or the broker goes away.
func (w *Worker) serve(ctx context.Context, goroutines int, fn Func) error {
	stop := context.AfterFunc(ctx, w.poke) // once, not for every batch
	defer stop()
	// A goroutine that spins, or sleeps past the scheduler, could keep the core that the
	// others need to finish.
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
		_ = b.Complete() // the requests get its error, too
		s.w.recycle(b)
	}
}

// take waits for its turn and for a batch. It returns nil if no batch will come.
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
	if b, s.err = s.w.await(ctx); b != nil {
		b.kept = true // fn may use it until it returns, even if it completes the batch
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
