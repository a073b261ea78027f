// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"context"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ringbatch/ringbatch/internal/attach"
	"github.com/ringbatch/ringbatch/internal/backoff"
	"github.com/ringbatch/ringbatch/internal/control"
	"github.com/ringbatch/ringbatch/internal/inside"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

// Config describes a worker. If the broker knows the model already, the signatures must
// agree, and the broker's policy counts.
type Config struct {
	Model     string
	Signature tensor.Signature

	Socket string // of the broker; default as for clients
	Name   string // for logs and statistics
	GPU    string // for statistics
	Depth  int    // batches handed over at once; default 2, or Concurrency + 1
	Share  int    // of the work, relative to other workers; default 1

	Concurrency   int           // calls of fn at once, in goroutines; default 1
	RunOnce       bool          // a batch that fails is never run again
	WaitForBroker time.Duration // for a broker that does not run yet
	Attached      func()        // called by Serve and KeepAttached before the first batch
	Version       string        // workers of another one are refused, unless the broker started all; "any" joins all
	Pad           string        // zero rows up to PadTo ("fixed") or to a preferred size ("preferred")
	PadTo         int
	Policy        policy.Policy // of the model, if this worker is the first to name it
	Pipeline      string        // as JSON (docs/pipelines.md), if Model is PIPELINE/STAGE
}

// Worker is one attachment. One goroutine at a time may call Next or Close.
type Worker struct {
	session *attach.Session
	pads    bool        // Config.Pad is set
	growing int         // the output that grows, or -1
	growDim int         // the place of its size in outDims
	direct  atomic.Bool // Planes was called: the worker may write outputs by itself
	gone    atomic.Bool
	watch   sync.WaitGroup

	// Used by the goroutine that takes batches.
	mail   *shm.Mailbox
	parker shm.Parker
	spin   shm.Spin
	next   uint64 // number of the mail to take next

	// Written when a batch is completed, read by that goroutine; nanoseconds.
	spinFor  atomic.Int64 // how long to spin for the next batch
	answered atomic.Int64 // when the last batch was answered, on shm.Now's clock

	mu     sync.Mutex // guards the fields below, and the mapping against a late poke
	done   shm.Producer[shm.Done]
	free   []*Batch   // not in use
	taken  []*Batch   // not completed yet
	idle   *sync.Cond // taken is empty
	closed bool
}

// defaultDepth lets the broker hand over the next batch while one runs.
const defaultDepth = 2

// Attach attaches once; it waits for the broker as KeepAttached does.
func Attach(ctx context.Context, cfg Config) (*Worker, error) {
	end := time.Now().Add(cfg.WaitForBroker)
	var pause backoff.Backoff
	for {
		w, err := attachOnce(ctx, cfg)
		if !status.RetryAttach(err) || time.Now().After(end) || !pause.Wait(ctx) {
			return w, err
		}
	}
}

// attachOnce tries once.
func attachOnce(ctx context.Context, cfg Config) (*Worker, error) {
	device := inside.DeviceOf(ctx)
	if err := cfg.Signature.Validate(); err != nil {
		return nil, fmt.Errorf("worker %s: %w", cfg.Model, err)
	}
	if t := cfg.Signature.FirstOnDevice(); t != nil && device == nil {
		return nil, fmt.Errorf("worker %s: %w: %s lies in device memory, and this worker has no GPU", cfg.Model,
			status.ErrNoGPU, t)
	}
	if cfg.Depth == 0 {
		cfg.Depth = min(max(defaultDepth, cfg.Concurrency+1), shm.MaxMailDepth)
	}
	if cfg.Concurrency < 0 || cfg.Concurrency > cfg.Depth {
		return nil, fmt.Errorf("worker %s: %w: concurrency %d, must be 0..%d (the depth)", cfg.Model,
			status.ErrInvalid, cfg.Concurrency, cfg.Depth)
	}
	s, err := attach.OpenWith(ctx, control.SocketPath(cfg.Socket), device, &control.Request{
		Op: control.OpWorker, Model: cfg.Model, Name: cfg.Name,
		Worker: &control.WorkerInfo{
			Inputs: tensor.SpecTexts(cfg.Signature.Inputs), Outputs: tensor.SpecTexts(cfg.Signature.Outputs),
			State: tensor.SpecTexts(cfg.Signature.State),
			Depth: cfg.Depth, Lanes: cfg.Concurrency, Share: cfg.Share, Pad: cfg.Pad, PadTo: cfg.PadTo,
			GPU: cfg.GPU, RunOnce: cfg.RunOnce, Program: cfg.Version,
		},
		Policy: cfg.Policy, Pipeline: cfg.Pipeline,
	})
	if err != nil {
		return nil, fmt.Errorf("worker %s: %w", cfg.Model, err)
	}
	w := &Worker{
		session: s,
		pads:    cfg.Pad != "",
		parker:  shm.Parker{Single: true},
		mail:    shm.NewMailbox(s.Words, s.Info.Depth, s.Info.MaxBatch),
		done:    shm.Producer[shm.Done]{Ring: shm.DoneRing(s.Words, s.Info.Depth)},
	}
	w.growing, w.growDim = s.Layout.Growing()
	w.idle = sync.NewCond(&w.mu)
	w.watch.Go(func() {
		s.Gone()
		w.gone.Store(true)
		w.poke()
	})
	return w, nil
}

// Close detaches and unmaps all batches. Those that were taken fail; the others go to
// other workers.
func (w *Worker) Close() {
	w.mu.Lock()
	closed := w.closed
	w.mu.Unlock()
	if closed {
		return
	}
	w.leave()
	w.mu.Lock()
	defer w.mu.Unlock()
	w.closed = true
	w.session.Close()
}

// poke makes Next look again. Any goroutine may call it.
func (w *Worker) poke() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.closed {
		w.mail.Poke()
	}
}

// Next waits for a batch until ctx ends; if it has ended before, it takes only one that
// is there. A worker may take Config.Depth batches before it completes one.
// ErrBrokerGone: attach again.
func (w *Worker) Next(ctx context.Context) (*Batch, error) {
	if b, err := w.tryNext(); b != nil || err != nil {
		return b, err
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if ctx.Done() != nil {
		stop := context.AfterFunc(ctx, w.poke)
		defer stop()
	}
	return w.await(ctx)
}

// await is Next for a caller that pokes the worker when ctx ends.
func (w *Worker) await(ctx context.Context) (*Batch, error) {
	for {
		seen := w.mail.Bell.Load()
		if b, err := w.tryNext(); b != nil || err != nil {
			return b, err
		}
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		if w.parker.Polite || !w.spin.Until(w.hasNext, math.MaxInt64) {
			w.mail.Wait(&w.parker, seen, w.next, math.MaxInt64)
		}
	}
}

// hasNext reports whether tryNext has a batch or an error to return.
func (w *Worker) hasNext() bool { return w.mail.Tail.Load() != w.next || w.gone.Load() }

// tryNext takes the next batch. It returns nil if there is none.
func (w *Worker) tryNext() (*Batch, error) {
	w.spin.Limit = w.spinFor.Load()
	w.spin.Anew(w.answered.Load())
	for {
		// SYNC POINT "mail", acquire side.
		tail := w.mail.Tail.Load()
		if tail == w.next {
			if w.gone.Load() {
				return nil, status.ErrBrokerGone
			}
			return nil, nil
		}
		if tail-w.next > uint64(w.session.Info.Depth) { // the broker breaks the protocol
			return nil, fmt.Errorf("%w: %d batches at once, %d fit", status.ErrProtocol, tail-w.next, w.session.Info.Depth)
		}
		w.spin.Over()
		b, err := w.take()
		if err != nil || len(b.reqs) > 0 {
			return b, err
		}
		b.Complete() // all its requests were canceled or have expired
	}
}

// take copies the next mail from the mailbox.
func (w *Worker) take() (*Batch, error) {
	mail, reqs := w.mail.At(w.next)
	w.next++
	w.mail.Taken.Store(w.next)
	b := w.blank()
	if err := b.read(mail, reqs); err != nil {
		return nil, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.taken = append(w.taken, b)
	return b, nil
}

// blank is a batch that is not in use.
func (w *Worker) blank() *Batch {
	w.mu.Lock()
	defer w.mu.Unlock()
	n := len(w.free)
	if n == 0 {
		return newBatch(w)
	}
	b := w.free[n-1]
	w.free = w.free[:n-1]
	b.kept = false
	b.ended.Store(false)
	return b
}
