// SPDX-License-Identifier: Apache-2.0

//go:build cuda

package cuda

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"golang.org/x/sys/unix"
	"gorgonia.org/cu"

	"github.com/ringbatch/ringbatch/internal/inside"
	"github.com/ringbatch/ringbatch/worker"
)

// While a batch is on the GPU, its worker polls the batch and the mailbox: 32
// times at once, then every 10 µs. A thread that blocks in the driver would
// see neither the mailbox nor a second lane.
const (
	eagerPolls = 32
	pollEvery  = 10 * time.Microsecond
)

// pauseAfter sleeps between polls, except for the first ones.
func pauseAfter(polls int) {
	if polls > eagerPolls {
		ts := unix.NsecToTimespec(int64(pollEvery))
		_ = unix.Nanosleep(&ts, nil)
	}
}

// Serve attaches and runs batches on the GPU until ctx ends, attaching again
// whenever the broker is restarted. Batches on the GPU when ctx ends are
// finished first. An error that matches ErrLost means that only a new process
// can go on.
func Serve(ctx context.Context, cfg worker.Config, m *Model) error {
	d, err := openDevice(m.options.Device)
	if err != nil {
		return fmt.Errorf("worker %s: %w", cfg.Model, err)
	}
	defer d.close()
	// nanosleep rounds up by the timer slack, by default 50 µs.
	_ = unix.Prctl(unix.PR_SET_TIMERSLACK, 1000, 0, 0, 0)
	p, err := m.load(d)
	if err != nil {
		return fmt.Errorf("worker %s: %w", cfg.Model, err)
	}
	if cfg.GPU == "" {
		cfg.GPU = fmt.Sprintf("%d %s", m.options.Device, d.name)
	}
	var shared *sharedMemory
	if cfg.Signature.FirstOnDevice() != nil {
		shared = &sharedMemory{d: d}
		ctx = inside.WithDevice(ctx, shared)
	}
	// On this goroutine, which has the device's context on its thread.
	return worker.KeepAttached(ctx, cfg, func(ctx context.Context, w *worker.Worker) error {
		err := serveAttached(ctx, w, d, p, shared, cfg.PadTo)
		if errors.Is(err, ErrLost) {
			inside.Of(ctx).Abandon() // a batch that may still be written to must not be answered
		}
		return err
	})
}

// ended is a context that has.
var ended = func() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}()

// server runs the batches of one attachment. A lane is in exactly one of free
// and busy.
type server struct {
	w          *worker.Worker
	p          program
	free, busy []*lane
	polls      int // since a batch came or was done
}

func serveAttached(ctx context.Context, w *worker.Worker, d *device, p program, shared *sharedMemory, padTo int) error {
	start := time.Now()
	session := inside.Of(ctx).Session()
	r, err := openRing(session.Layout, session.Planes, shared)
	if err != nil {
		return fmt.Errorf("register the ring with the driver: %w", err)
	}
	defer func() { _ = r.close() }()
	lanes, err := newLanes(d, r, p, session.Info.Depth, max(session.Layout.MaxBatch, padTo))
	if err != nil {
		return err
	}
	s := &server{w: w, p: p, free: lanes}
	defer func() { closeLanes(append(s.free, s.busy...)) }()
	slog.Info("ring registered with the GPU", "gpu", d.name, "bytes", session.Planes.Size(), "lanes", len(lanes),
		"took", time.Since(start).Round(time.Microsecond))
	return s.run(ctx)
}

// run loops until the broker goes or ctx ends:
//
//  1. nothing on the GPU: wait for a batch
//  2. answer the batches that are done
//  3. a lane is free: take a batch if there is one
func (s *server) run(ctx context.Context) error {
	for {
		if len(s.busy) == 0 {
			if err := ctx.Err(); err != nil { // also where batches keep coming
				return err
			}
			b, err := s.w.Next(ctx)
			if err != nil {
				return err
			}
			if err := s.submit(b); err != nil {
				return err
			}
			continue
		}
		moved, err := s.reap()
		if err != nil {
			return err
		}
		if len(s.free) > 0 && ctx.Err() == nil {
			// If the broker is gone, Next says so when the GPU is idle.
			if b, err := s.w.Next(ended); err == nil {
				if err := s.submit(b); err != nil {
					return err
				}
				moved = true
			}
		}
		if s.polls++; moved {
			s.polls = 0
		}
		pauseAfter(s.polls)
	}
}

// submit puts a batch on a free lane. A call that failed fails the batch. Before
// that, submit waits for the lane: its kernels may write into the batch's slots.
// If the context is dead, the batch stays unanswered: the broker sees this
// process end, and runs its batches elsewhere.
func (s *server) submit(b *worker.Batch) error {
	l := s.free[len(s.free)-1]
	err := l.submit(ringBatch{b}, s.p)
	if err == nil {
		s.free = s.free[:len(s.free)-1]
		s.busy = append(s.busy, l)
		return nil
	}
	if e := checked("cuStreamSynchronize", l.stream.Synchronize()); e != nil {
		err = e
	}
	if e := contextError(err); e != nil {
		return e
	}
	slog.Error("batch failed on the GPU", "batch", b.ID(), "rows", b.Rows(), "error", err)
	b.FailAll(err)
	b.Complete()
	return nil
}

// contextError returns ErrLost if a call failed because the context is dead:
// by its own error, or by the context's.
func contextError(err error) error {
	for _, err := range []error{err, checked("cuCtxSynchronize", cu.Synchronize())} {
		var e *Error
		if errors.As(err, &e) && e.Lost() {
			return fmt.Errorf("%w (%v)", ErrLost, err)
		}
	}
	return nil
}

// reap answers the batches that are done.
func (s *server) reap() (any bool, err error) {
	for i := 0; i < len(s.busy); {
		l := s.busy[i]
		done, err := l.done()
		if err != nil {
			// A kernel or a copy has failed, and the context is dead with it.
			return false, fmt.Errorf("%w (%v)", ErrLost, err)
		}
		if !done {
			i++
			continue
		}
		b := l.batch.(ringBatch).Batch
		if err := s.p.finish(b); err != nil {
			b.FailAll(err)
		}
		b.Complete()
		l.batch = nil
		s.busy = slices.Delete(s.busy, i, i+1)
		s.free = append(s.free, l)
		any = true
	}
	return any, nil
}
