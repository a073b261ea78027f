package worker

import (
	"context"
	"errors"
	"fmt"
	"math"
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

// Config says what a worker serves. Where the broker knows the model already
// (from its configuration or from an earlier worker), the signature must
// agree and the rest of the policy is the broker's.
type Config struct {
	Model     string
	Signature tensor.Signature

	Socket string // the broker's; default as for clients
	Name   string // for logs and statistics
	Depth  int    // batches handed over at once, running one included; default 2
	Weight int    // share of the work relative to other workers; default 1
	GPU    string // where it computes, for statistics

	// Pad asks for batches padded to PadTo rows ("fixed"), or to the next
	// preferred size ("preferred"). Padding rows are zero, private, and never
	// answered.
	Pad   string
	PadTo int

	// Policy declares the model where this worker is the first to name it; what
	// it leaves open takes the broker's defaults.
	Policy policy.Policy

	Memory shm.Memory // for tests
}

// Worker is one attachment. It belongs to one goroutine at a time; end the
// context of a Next to stop it from another.
type Worker struct {
	session *attach.Session
	mail    *shm.Mailbox
	done    shm.Producer[shm.Done]
	parker  shm.Parker
	spin    shm.Spin
	next    uint64 // number of the mail to take next
	gone    atomic.Bool
	watch   sync.WaitGroup
	free    []*Batch // not in use
	taken   []*Batch // not completed yet
	zeros   [2][]byte
	pads    bool // asked for padding

	mu     sync.Mutex // guards the mapping against a late poke
	closed bool
}

// DefaultDepth lets the broker hand over the next batch while one runs.
const DefaultDepth = 2

// Attach connects to the broker and declares the model if need be.
func Attach(ctx context.Context, cfg Config) (*Worker, error) {
	if err := cfg.Signature.Validate(); err != nil {
		return nil, fmt.Errorf("worker %s: %w", cfg.Model, err)
	}
	if cfg.Depth == 0 {
		cfg.Depth = DefaultDepth
	}
	if cfg.Memory == nil {
		cfg.Memory = shm.Memfd{}
	}
	s, err := attach.Open(ctx, control.SocketPath(cfg.Socket), cfg.Memory, &control.Request{
		Op: control.OpWorker, Model: cfg.Model, Name: cfg.Name,
		Worker: &control.WorkerInfo{
			Inputs: tensor.SpecTexts(cfg.Signature.Inputs), Outputs: tensor.SpecTexts(cfg.Signature.Outputs),
			Depth: cfg.Depth, Weight: cfg.Weight, Pad: cfg.Pad, PadTo: cfg.PadTo, GPU: cfg.GPU,
		},
		Policy: cfg.Policy,
	})
	if err != nil {
		return nil, fmt.Errorf("worker %s: %w", cfg.Model, err)
	}
	w := &Worker{
		session: s,
		pads:    cfg.Pad != "",
		mail:    shm.NewMailbox(s.Words, s.Info.Depth, s.Info.MaxBatch),
		done:    shm.Producer[shm.Done]{Ring: shm.DoneRing(s.Words, s.Info.Depth)},
	}
	w.watch.Add(1)
	go func() {
		defer w.watch.Done()
		s.Gone()
		w.gone.Store(true)
		w.poke()
	}()
	return w, nil
}

// Close detaches. Batches that were taken and not completed fail first; what
// the broker had handed over beyond those goes to other workers.
func (w *Worker) Close() {
	w.Leave()
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.closed {
		w.closed = true
		w.session.Close()
	}
}

// Leave is Close without unmapping: views into the batches' memory stay
// readable until Close.
func (w *Worker) Leave() {
	for len(w.taken) > 0 {
		b := w.taken[0]
		b.FailAll(errClosed)
		b.Complete()
	}
	w.session.HangUp()
	w.watch.Wait()
}

var errClosed = errors.New("the worker was closed before it ran this request")

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

// Planes is the mapping with all tensors, to pin it for a GPU.
func (w *Worker) Planes() *shm.Segment { return w.session.Planes }

// MaxBatchSize is the most rows a batch can have.
func (w *Worker) MaxBatchSize() int { return w.session.Info.MaxBatch }

// Settings are the model's policy in force when this worker attached.
func (w *Worker) Settings() policy.Settings { return w.session.Settings }

// Notes are how the model's policy differs from what this worker asked for,
// one sentence each.
func (w *Worker) Notes() []string { return w.session.Info.Notes }

// ID is the worker's number with its broker.
func (w *Worker) ID() uint32 { return w.session.Info.WorkerID }

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
	return w.await(ctx)
}

// await is Next for a caller that pokes the worker when ctx ends.
func (w *Worker) await(ctx context.Context) (*Batch, error) {
	for {
		seen := w.mail.Bell.Load()
		if b, err := w.TryNext(); b != nil || err != nil {
			return b, err
		}
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		if !w.spin.Until(w.awake, math.MaxInt64) {
			w.mail.Wait(&w.parker, seen, w.next, time.Hour)
		}
	}
}

// awake tells whether there is a reason not to park.
func (w *Worker) awake() bool { return w.mail.Tail.Load() != w.next || w.gone.Load() }

// TryNext takes the next batch if there is one, else returns nil.
func (w *Worker) TryNext() (*Batch, error) {
	for {
		// SYNC POINT "mail", acquire side.
		if w.mail.Tail.Load() == w.next {
			if w.gone.Load() {
				return nil, status.ErrBrokerGone
			}
			return nil, nil
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
	var b *Batch
	if n := len(w.free); n > 0 {
		b, w.free = w.free[n-1], w.free[:n-1]
	} else {
		b = newBatch(w)
	}
	if err := b.read(mail, reqs); err != nil {
		return nil, err
	}
	w.taken = append(w.taken, b)
	return b, nil
}
