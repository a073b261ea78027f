// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"context"
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

// Config says what a worker serves: a model, or a stage of a pipeline. Where the broker knows the model already
// (from its configuration or from an earlier worker), the signature must
// agree and the rest of the policy is the broker's.
type Config struct {
	Model     string
	Signature tensor.Signature

	Socket string // the broker's; default as for clients
	Name   string // for logs and statistics
	Depth  int    // batches handed over at once, running ones included; default 2, or Concurrency + 1
	Weight int    // share of the work relative to other workers; default 1
	GPU    string // where it computes, for statistics

	// Concurrency is how many batches Serve runs at once, each in a goroutine
	// of its own; default 1. The broker hands over a batch that is not full
	// while fewer than that are running.
	Concurrency int

	// WaitForBroker is how long Serve and KeepAttached wait for a broker that
	// is not there at first.
	WaitForBroker time.Duration

	// Alone says that the process does little but serve this model: then a
	// worker that waits for milliseconds between batches may keep one of
	// several Ps meanwhile, which makes it wake sooner and cost less.
	Alone bool

	// Pad asks for batches padded to PadTo rows ("fixed"), or to the next
	// preferred size ("preferred"). Padding rows are zero, private, and never
	// answered.
	Pad   string
	PadTo int

	// Policy declares the model where this worker is the first to name it; what
	// it leaves open takes the broker's defaults.
	Policy policy.Policy

	// Pipeline declares the pipeline that Model is a stage of (PIPELINE/STAGE),
	// as JSON (docs/pipelines.md), where this worker is the first to name it.
	Pipeline string

	// Device brings the GPU of a worker that has tensors in device memory. The
	// worker closes it.
	Device shm.Device

	Memory shm.Memory // for tests
}

// Worker is one attachment. Taking batches (Next, TryNext, NextFor) and closing
// belong to one goroutine at a time; batches may be completed by any. End the
// context of a Next to stop it from another goroutine.
type Worker struct {
	session *attach.Session
	pads    bool        // asked for padding
	direct  atomic.Bool // it has the mapping, and may write outputs past its batches
	gone    atomic.Bool
	watch   sync.WaitGroup

	// Of the goroutine that takes batches.
	mail   *shm.Mailbox
	parker shm.Parker
	spin   shm.Spin
	next   uint64 // number of the mail to take next
	taking taking

	// What completing a batch tells that goroutine, nanoseconds.
	spinFor  atomic.Int64 // how long to spin for the next batch
	answered atomic.Int64 // when it was, on shm.Now's clock

	mu     sync.Mutex // guards what follows, and the mapping against a late poke
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
	if err := cfg.Signature.Validate(); err != nil {
		return nil, fmt.Errorf("worker %s: %w", cfg.Model, err)
	}
	if t := cfg.Signature.FirstOnDevice(); t != nil && cfg.Device == nil {
		return nil, fmt.Errorf("worker %s: %w: %s lies in device memory, and this worker has no GPU", cfg.Model, status.ErrNoGPU, t)
	}
	if cfg.Depth == 0 {
		cfg.Depth = min(max(DefaultDepth, cfg.Concurrency+1), shm.MaxMailDepth)
	}
	if cfg.Concurrency < 0 || cfg.Concurrency > cfg.Depth {
		return nil, fmt.Errorf("worker %s: %w: concurrency %d, must be 0..%d (the depth)", cfg.Model, status.ErrInvalid, cfg.Concurrency, cfg.Depth)
	}
	if cfg.Memory == nil {
		cfg.Memory = shm.Memfd{}
	}
	s, err := attach.OpenWith(ctx, control.SocketPath(cfg.Socket), cfg.Memory, cfg.Device, &control.Request{
		Op: control.OpWorker, Model: cfg.Model, Name: cfg.Name,
		Worker: &control.WorkerInfo{
			Inputs: tensor.SpecTexts(cfg.Signature.Inputs), Outputs: tensor.SpecTexts(cfg.Signature.Outputs),
			Depth: cfg.Depth, Lanes: cfg.Concurrency, Weight: cfg.Weight, Pad: cfg.Pad, PadTo: cfg.PadTo, GPU: cfg.GPU,
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

// Close detaches. Batches that were taken and not completed fail first; what
// the broker had handed over beyond those goes to other workers. Their memory
// is unmapped: no goroutine may use a batch any more.
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

// Leave is Close without unmapping: views into the batches' memory stay
// readable until Close.
func (w *Worker) Leave() {
	w.mu.Lock()
	left := slices.Clone(w.taken)
	w.mu.Unlock()
	w.session.Synchronize() // its kernels may be writing outputs of these requests
	why := errClosed
	if w.gone.Load() { // then the clients may send it again, and may learn of that here first
		why = status.ErrBrokerGone
	}
	for _, b := range left {
		if b.end() {
			b.FailAll(why)
			b.answer()
		}
	}
	w.mu.Lock()
	for len(w.taken) > 0 { // another goroutine is in the midst of completing it
		w.idle.Wait()
	}
	w.mu.Unlock()
	w.session.HangUp()
	w.watch.Wait()
}

// Abandon makes Close do nothing: the memory stays mapped and batches that
// were taken stay unanswered. It is for a worker whose device may still write
// into them. The process must end then; the broker has its batches run again
// elsewhere.
func (w *Worker) Abandon() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.closed = true
}

// poke makes Next look around, from whatever goroutine.
func (w *Worker) poke() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.closed {
		w.mail.Poke()
	}
}

// Layout is where everything of the model lies.
func (w *Worker) Layout() *shm.Layout { return w.session.Layout }

// Planes is the mapping with all tensors, to pin it for a GPU. Whether a worker that
// has it wrote all outputs is not checked (see Batch.Complete).
func (w *Worker) Planes() *shm.Segment {
	w.direct.Store(true)
	return w.session.Planes
}

// MaxBatchSize is the most rows a batch can have.
func (w *Worker) MaxBatchSize() int { return w.session.Info.MaxBatch }

// Settings are the model's policy in force when this worker attached.
func (w *Worker) Settings() policy.Settings { return w.session.Settings }

// Notes are how the model's policy differs from what this worker asked for,
// one sentence each.
func (w *Worker) Notes() []string { return w.session.Info.Notes }

// ID is the worker's number with its broker.
func (w *Worker) ID() uint32 { return w.session.Info.WorkerID }

// Depth is how many batches may be taken and not completed.
func (w *Worker) Depth() int { return w.session.Info.Depth }

// SetLanes tells the broker how many batches this worker wants to run at once
// from now on, 1 … Depth: a worker that passes its batches on elsewhere knows
// only then how many are welcome. More than that are not handed over; the
// requests wait in the queue, where batches grow. The broker hears of it when
// it next reads a batch's end.
func (w *Worker) SetLanes(n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.closed {
		w.mail.Lanes.Store(uint32(min(max(n, 1), w.Depth())))
	}
}

// Next takes the next batch, waiting until ctx ends. It may be called again
// before the batch before it is completed, as far as the depth goes. The
// error matches ErrBrokerGone when the broker went away.
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

// NextFor is Next for at most d: ErrTimeout if no batch comes. It allocates
// nothing and sets no timer.
func (w *Worker) NextFor(d time.Duration) (*Batch, error) {
	return w.await(context.Background(), shm.Now()+int64(d))
}

// await is Next until a time on shm.Now's clock, for a caller that pokes the
// worker when ctx ends.
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
		if w.parker.Polite || !w.spin.Until(w.awake, until) {
			w.mail.Wait(&w.parker, seen, w.next, time.Duration(left))
		}
	}
}

// awake tells whether there is a reason not to park.
func (w *Worker) awake() bool { return w.mail.Tail.Load() != w.next || w.gone.Load() }

// TryNext takes the next batch if there is one, else returns nil.
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
		if tail-w.next > uint64(w.Depth()) { // only a broker that breaks the protocol hands over more
			return nil, fmt.Errorf("%w: %d batches at once, %d fit", status.ErrProtocol, tail-w.next, w.Depth())
		}
		w.spin.Over()
		b, err := w.take()
		if err != nil || len(b.reqs) > 0 {
			return b, err
		}
		b.Complete() // all of it was canceled or has expired: nobody waits for it
	}
}

// take copies the next mail out of the mailbox.
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
