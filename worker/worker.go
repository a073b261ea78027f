// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ringbatch/ringbatch/internal/attach"
	"github.com/ringbatch/ringbatch/internal/control"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

// Config describes a worker: the model, or stage of a pipeline, that it serves, and how
// it attaches. If the broker knows the model already, from its configuration or from an
// earlier worker, the signatures must agree, and the broker's policy counts.
type Config struct {
	Model     string
	Signature tensor.Signature

	Socket string // of the broker; default as for clients
	Name   string // for logs and statistics
	Depth  int    // batches handed over at once, running ones included; default 2, or Concurrency + 1
	Share  int    // of the work, relative to other workers; default 1
	GPU    string // the GPU that it computes on, for statistics

	// Concurrency is the number of batches that Serve runs at once, each in a
	// goroutine; default 1. While fewer batches run, the broker hands over batches that
	// are not full.
	Concurrency int

	// WaitForBroker is how long Attach, Serve and KeepAttached wait for a broker that does
	// not run yet.
	WaitForBroker time.Duration

	// Version says what the worker computes. The broker refuses a worker beside workers of
	// another version, unless it has started them all: their answers would mix. Workers
	// without a version join each other; "any" joins all.
	Version string

	// Attached, if not nil, is called by Serve and KeepAttached after each
	// attachment, before the first batch.
	Attached func()

	// RunOnce forbids the broker to run a batch of this worker again. If the batch
	// fails or the worker dies, all its requests fail.
	RunOnce bool

	// Alone says that the process does little besides serving this model. A worker that
	// waits for milliseconds between batches may then keep one of several Ps, so that
	// it wakes sooner and costs less.
	Alone bool

	// Pad asks for batches padded to PadTo rows ("fixed"), or to the next preferred
	// size ("preferred"). Padding rows are zero and private, and are not answered.
	Pad   string
	PadTo int

	// Policy is the model's policy if this worker is the first to name the model. The
	// broker's defaults fill in the other keys.
	Policy policy.Policy

	// Pipeline declares, as JSON (docs/pipelines.md), the pipeline whose stage Model
	// (PIPELINE/STAGE) is, if this worker is the first to name it.
	Pipeline string

	// Device is the GPU of a worker with tensors in device memory. The worker closes it.
	Device shm.Device
	Memory shm.Memory // for tests
}

// Worker is one attachment to the broker. Only one goroutine at a time may take batches
// (Next, TryNext, NextFor) or close the worker; any goroutine may complete a batch. To
// stop a Next from another goroutine, end its context.
type Worker struct {
	session *attach.Session
	pads    bool        // Config.Pad is set
	direct  atomic.Bool // Planes was called: the worker may write outputs by itself
	gone    atomic.Bool
	watch   sync.WaitGroup

	// Used by the goroutine that takes batches.
	mail   *shm.Mailbox
	parker shm.Parker
	spin   shm.Spin
	next   uint64 // number of the mail to take next
	taking taking

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

// DefaultDepth lets the broker hand over the next batch while one runs.
const DefaultDepth = 2

// Attach connects to the broker and declares the model if need be.
func Attach(ctx context.Context, cfg Config) (*Worker, error) {
	end := time.Now().Add(cfg.WaitForBroker)
	for delay := firstRetry; ; delay = min(2*delay, lastRetry) {
		w, err := attachOnce(ctx, cfg)
		var code status.Code
		if !errors.As(err, &code) || !code.RetryAttach() || time.Now().Add(delay).After(end) {
			return w, err
		}
		select {
		case <-ctx.Done():
			return nil, err
		case <-time.After(delay):
		}
	}
}

// attachOnce tries once.
func attachOnce(ctx context.Context, cfg Config) (*Worker, error) {
	if err := cfg.Signature.Validate(); err != nil {
		return nil, fmt.Errorf("worker %s: %w", cfg.Model, err)
	}
	if t := cfg.Signature.FirstOnDevice(); t != nil && cfg.Device == nil {
		return nil, fmt.Errorf("worker %s: %w: %s lies in device memory, and this worker has no GPU", cfg.Model,
			status.ErrNoGPU, t)
	}
	if cfg.Depth == 0 {
		cfg.Depth = min(max(DefaultDepth, cfg.Concurrency+1), shm.MaxMailDepth)
	}
	if cfg.Concurrency < 0 || cfg.Concurrency > cfg.Depth {
		return nil, fmt.Errorf("worker %s: %w: concurrency %d, must be 0..%d (the depth)", cfg.Model,
			status.ErrInvalid, cfg.Concurrency, cfg.Depth)
	}
	if cfg.Memory == nil {
		cfg.Memory = shm.Memfd{}
	}
	s, err := attach.OpenWith(ctx, control.SocketPath(cfg.Socket), cfg.Memory, cfg.Device, &control.Request{
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
		parker:  shm.Parker{Alone: cfg.Alone},
		mail:    shm.NewMailbox(s.Words, s.Info.Depth, s.Info.MaxBatch),
		done:    shm.Producer[shm.Done]{Ring: shm.DoneRing(s.Words, s.Info.Depth)},
	}
	w.idle = sync.NewCond(&w.mu)
	w.watch.Go(func() {
		s.Gone()
		w.gone.Store(true)
		w.poke()
	})
	return w, nil
}

// Close detaches. Batches that were taken and not completed fail; batches that were not
// taken go to other workers. The memory of all batches is unmapped, so no goroutine may
// use a batch any more.
func (w *Worker) Close() {
	w.mu.Lock()
	closed := w.closed
	w.mu.Unlock()
	if closed {
		return
	}
	w.Leave()
	w.mu.Lock()
	defer w.mu.Unlock()
	w.closed = true
	w.session.Close()
}

// Leave is Close without unmapping: views into batches stay readable until Close.
func (w *Worker) Leave() {
	w.mu.Lock()
	left := slices.Clone(w.taken)
	w.mu.Unlock()
	w.session.Synchronize() // GPU kernels may still write outputs of these requests
	why := errClosed
	if w.gone.Load() { // the clients may send the requests again
		why = status.ErrBrokerGone
	}
	for _, b := range left {
		if b.beginAnswer() {
			b.failAll(why, false)
			b.answer()
		}
	}
	w.mu.Lock()
	for len(w.taken) > 0 { // another goroutine is completing it
		w.idle.Wait()
	}
	w.mu.Unlock()
	w.session.HangUp()
	w.watch.Wait()
}

// Abandon makes Close do nothing: the memory stays mapped, and taken batches stay
// unanswered. It is for a worker whose device may still write into them. The process
// must end then; the broker runs its batches again on other workers.
func (w *Worker) Abandon() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.closed = true
}

// poke makes Next look again. Any goroutine may call it.
func (w *Worker) poke() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.closed {
		w.mail.Poke()
	}
}

// Layout is the layout of the model's shared memory.
func (w *Worker) Layout() *shm.Layout { return w.session.Layout }

// Planes is the mapping with all tensors, for example to pin it for a GPU. After a call
// of Planes, Batch.Complete no longer checks that all outputs were written.
func (w *Worker) Planes() *shm.Segment {
	w.direct.Store(true)
	return w.session.Planes
}

// MaxBatchSize is the most rows of a batch.
func (w *Worker) MaxBatchSize() int { return w.session.Info.MaxBatch }

// Settings are the model's policy at the time when this worker attached.
func (w *Worker) Settings() policy.Settings { return w.session.Settings }

// Notes are sentences about differences between the model's policy and Config.Policy.
func (w *Worker) Notes() []string { return w.session.Info.Notes }

// ID is the number that the broker gave this worker.
func (w *Worker) ID() uint32 { return w.session.Info.WorkerID }

// Depth is the most batches that may be taken and not completed.
func (w *Worker) Depth() int { return w.session.Info.Depth }

// SetLanes sets the number of batches, 1 … Depth, that this worker runs at once from now
// on. The broker hands over no more; further requests wait in the queue, where batches
// grow. It is for a worker that passes batches on, and learns only then how many the
// other side takes. The broker reads the number when it next reads a batch's end.
func (w *Worker) SetLanes(n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.closed {
		w.mail.Lanes.Store(uint32(min(max(n, 1), w.Depth())))
	}
}

// Next waits for the next batch until ctx ends. A worker may take up to Depth batches
// before it completes one. If the broker went away, the error matches ErrBrokerGone.
func (w *Worker) Next(ctx context.Context) (*Batch, error) {
	if b, err := w.TryNext(); b != nil || err != nil {
		return b, err
	}
	if ctx.Done() != nil {
		stop := context.AfterFunc(ctx, w.poke)
		defer stop()
	}
	return w.await(ctx, math.MaxInt64)
}

// NextFor is Next for at most d; if no batch comes it returns ErrTimeout. It does not
// allocate and sets no timer.
func (w *Worker) NextFor(d time.Duration) (*Batch, error) {
	return w.await(context.Background(), shm.Now()+int64(d))
}

// await is Next until a time on shm.Now's clock. The caller pokes the worker when ctx
// ends.
func (w *Worker) await(ctx context.Context, until int64) (*Batch, error) {
	for {
		seen := w.mail.Bell.Load()
		if b, err := w.TryNext(); b != nil || err != nil {
			return b, err
		}
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		left := until - shm.Now()
		if left <= 0 {
			return nil, status.ErrTimeout
		}
		if w.parker.Polite || !w.spin.Until(w.hasNext, until) {
			w.mail.Wait(&w.parker, seen, w.next, time.Duration(left))
		}
	}
}

// hasNext reports whether TryNext has a batch or an error to return.
func (w *Worker) hasNext() bool { return w.mail.Tail.Load() != w.next || w.gone.Load() }

// TryNext takes the next batch. It returns nil if there is none.
func (w *Worker) TryNext() (*Batch, error) {
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
		if tail-w.next > uint64(w.Depth()) { // the broker breaks the protocol
			return nil, fmt.Errorf("%w: %d batches at once, %d fit", status.ErrProtocol, tail-w.next, w.Depth())
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
