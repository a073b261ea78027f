package worker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"time"

	"github.com/ringbatch/ringbatch/status"
)

// Func runs one batch: it reads the inputs and writes the outputs in place.
// An error, or a panic, fails the batch's requests with its text, and the
// worker goes on. Single requests fail by Batch.Fail.
type Func func(ctx context.Context, b *Batch) error

// Re-attaching backs off between these.
const (
	firstRetry = 10 * time.Millisecond
	lastRetry  = time.Second
)

// Serve attaches and runs fn for every batch until ctx ends, attaching again
// whenever the broker is restarted. A batch that is running when ctx ends is
// finished first. Serve returns nil after ctx ended, or the reason why it
// could not attach at first.
func Serve(ctx context.Context, cfg Config, fn Func) error {
	w, err := Attach(ctx, cfg)
	if errors.Is(err, status.ErrBrokerGone) || errors.Is(err, status.ErrDraining) { // it is being restarted just now
		w, err = reattach(ctx, cfg)
	}
	for {
		if ctx.Err() != nil && err != nil {
			return nil
		}
		if err != nil {
			return err
		}
		w.serve(ctx, fn)
		w.Close()
		if ctx.Err() != nil {
			return nil
		}
		slog.Info("broker went away, attaching again", "model", cfg.Model)
		w, err = reattach(ctx, cfg)
	}
}

func reattach(ctx context.Context, cfg Config) (*Worker, error) {
	for delay := firstRetry; ; delay = min(2*delay, lastRetry) {
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(delay):
		}
		w, err := Attach(ctx, cfg)
		if err == nil || errors.Is(err, status.ErrSignatureMismatch) || errors.Is(err, status.ErrForbidden) {
			return w, err
		}
	}
}

// serve runs batches until the broker goes or ctx ends.
func (w *Worker) serve(ctx context.Context, fn Func) {
	stop := context.AfterFunc(ctx, w.poke) // once, not for every batch
	defer stop()
	for ctx.Err() == nil {
		b, err := w.await(ctx)
		if err != nil {
			return
		}
		if err := run(ctx, b, fn); err != nil {
			b.FailAll(err)
		}
		b.Complete()
	}
}

// run calls fn and turns a panic into an error.
func run(ctx context.Context, b *Batch, fn Func) (err error) {
	defer func() {
		if p := recover(); p != nil {
			slog.Error("worker function panicked", "panic", p, "stack", string(debug.Stack()))
			err = fmt.Errorf("worker function panicked: %v", p)
		}
	}()
	return fn(ctx, b)
}
