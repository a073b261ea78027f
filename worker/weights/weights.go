// SPDX-License-Identifier: Apache-2.0

// Package weights changes the weights of a model while it serves. A Publisher, one for
// each model, writes versions into shared memory; workers follow:
//
//	p, err := weights.NewPublisher(ctx, "policy", specs)
//	b, err := p.Begin(ctx)               // a buffer that no worker reads
//	copy(b.Tensor(0), w0)
//	version, err := p.Publish(b)         // requests from now on are answered with it, or with a later one
//
//	f, err := weights.Follow(ctx, "policy", load) // waits for the first version
//	err = worker.Serve(ctx, worker.Config{…, Weights: f}, fn)
//
// A batch runs with one version, and its answers name it (client.Request.Version). No
// peer waits for another: a batch that runs finishes with the weights that it began with,
// and slow workers skip versions.
package weights

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/ringbatch/ringbatch/internal/attach"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

// Option changes how a publisher or follower attaches.
type Option func(*options)

type options struct {
	socket, name string
	memory       shm.Memory
}

// WithSocket names the broker's socket; the default is $RINGBATCH_SOCKET, or broker.sock
// in the user's runtime folder.
func WithSocket(path string) Option { return func(o *options) { o.socket = path } }

// WithName names this peer in the broker's statistics.
func WithName(name string) Option { return func(o *options) { o.name = name } }

// WithMemory replaces shared memory, for tests in one process.
func WithMemory(m shm.Memory) Option { return func(o *options) { o.memory = m } }

// attachment is a peer's attachment, which it renews when the broker goes away.
type attachment struct {
	model   string
	tensors []tensor.Spec // of a publisher
	options
	failed func(error) // gets the errors of attempts to attach again
	life   context.Context
	stop   context.CancelFunc
	done   sync.WaitGroup
}

const firstPause, lastPause = 5 * time.Millisecond, 500 * time.Millisecond

// open attaches, and tries again while worth says so.
func (a *attachment) open(ctx context.Context, worth func(error) bool) (*attach.Weights, error) {
	for pause := firstPause; ; pause = min(2*pause, lastPause) {
		w, err := attach.OpenWeights(ctx, a.socket, a.memory, a.model, a.name, a.tensors)
		if err == nil || !worth(err) {
			return w, err
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("%w (%w)", err, ctx.Err())
		case <-time.After(pause):
		}
	}
}

// begin attaches, calls use, and does so again whenever the broker goes away.
func (a *attachment) begin(ctx context.Context, worth func(error) bool, opts []Option, use func(*attach.Weights)) error {
	a.memory = shm.Memfd{}
	for _, o := range opts {
		o(&a.options)
	}
	w, err := a.open(ctx, worth)
	if err != nil {
		return err
	}
	use(w)
	a.life, a.stop = context.WithCancel(context.Background())
	a.done.Go(func() {
		for {
			stop := context.AfterFunc(a.life, w.SayGoodbye)
			w.Gone()
			stop()
			w.HangUp()
			if a.life.Err() != nil {
				return
			}
			slog.Info("broker went away, attaching to the weights again", "model", a.model)
			if w, err = a.open(a.life, func(err error) bool { a.failed(err); return true }); err != nil {
				return
			}
			use(w)
		}
	})
	return nil
}

func (a *attachment) close() {
	a.stop()
	a.done.Wait()
}

// Publisher publishes the weights of a model. Only one goroutine at a time may use it.
type Publisher struct {
	attachment
	mu      sync.Mutex
	live    *attach.Weights
	before  []*attach.Weights // of brokers that are gone; a Buffer may still be there
	refusal error             // by the broker that runs now
	version shm.Version       // the last published
	heard   shm.Version       // the latest withdrawal that is not to be returned (again)
}

// Buffer is memory for one version.
type Buffer struct {
	w *attach.Weights
	n int
}

// Tensor is the memory of the k-th tensor. It has bytes of an older version.
func (b Buffer) Tensor(k int) []byte { return b.w.Tensor(b.n, k) }

// NewPublisher attaches the publisher of a model. If there is another one, the error is
// ErrBusy. When the broker is restarted, the publisher attaches again by itself, and
// publishes its last version once more.
func NewPublisher(ctx context.Context, model string, tensors []tensor.Spec, opts ...Option) (*Publisher, error) {
	p := &Publisher{}
	p.attachment = attachment{model: model, tensors: tensors, failed: p.failed}
	if _, err := shm.NewWeightsLayout(tensors); err != nil {
		return nil, err
	}
	if err := p.begin(ctx, func(error) bool { return false }, opts, p.use); err != nil {
		return nil, err
	}
	return p, nil
}

func (p *Publisher) use(w *attach.Weights) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.live != nil {
		p.version = max(p.version, p.live.Last())
		w.CarryOver(p.live.Weights)
		p.before = append(p.before, p.live)
	}
	p.live, p.refusal = w, nil
	withdrawn, _ := w.Refused() // of the publisher before
	p.heard = max(p.heard, withdrawn)
}

// failed keeps the errors that a publisher must hear: without a broker it goes on.
func (p *Publisher) failed(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.refusal = err; noBroker(err) {
		p.refusal = nil
	}
}

func noBroker(err error) bool {
	return slices.ContainsFunc([]error{status.ErrNoBroker, status.ErrBrokerGone, status.ErrDraining, status.ErrTimeout, context.Canceled},
		func(e error) bool { return errors.Is(err, e) })
}

// Begin returns a buffer that no worker reads, and that the next Publish publishes. Two of
// the four have the last good versions; while slow workers read the others it waits.
func (p *Publisher) Begin(ctx context.Context) (Buffer, error) {
	for {
		b, err := p.freeBuffer()
		if err != nil || b.n >= 0 {
			return b, err
		}
		select {
		case <-ctx.Done():
			return Buffer{}, fmt.Errorf("%w: %w", p.full(), ctx.Err())
		case <-p.life.Done():
		case <-time.After(100 * time.Microsecond):
		}
	}
}

// freeBuffer is a buffer whose n is -1 while there is none.
func (p *Publisher) freeBuffer() (Buffer, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.life.Err() != nil {
		return Buffer{}, status.ErrClosed
	}
	if p.refusal != nil {
		return Buffer{}, p.refusal
	}
	return Buffer{p.live, p.live.FreeBuffer()}, nil
}

func (p *Publisher) full() error {
	return fmt.Errorf("%w: slow workers of %q read older versions, and no buffer is free", status.ErrFull, p.model)
}

// Publish makes a written buffer the current version. A request that is committed after
// Publish has returned is answered with this version or a later one. If workers could not
// load an earlier version, or it was withdrawn, Publish publishes nothing and returns
// ErrFailed with the reason, once.
func (p *Publisher) Publish(b Buffer) (shm.Version, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.life.Err() != nil {
		return 0, status.ErrClosed
	}
	switch v, reason := p.live.Refused(); {
	case p.refusal != nil:
		return 0, p.refusal
	case v > p.heard:
		p.heard = v
		return 0, fmt.Errorf("%w: version %d of %q was withdrawn: %s", status.ErrFailed, v, p.model, reason)
	}
	if b.w != p.live { // the broker was restarted meanwhile
		n := p.live.FreeBuffer()
		if n < 0 {
			return 0, p.full()
		}
		copy(p.live.Buffer(n), b.w.Buffer(b.n))
		b = Buffer{p.live, n}
	}
	p.version = max(p.version, b.w.Last()) + 1
	b.w.Publish(b.n, p.version)
	p.forget()
	return p.version, nil
}

// forget gives back the memory of brokers that are gone.
func (p *Publisher) forget() {
	for _, w := range p.before {
		w.Close()
	}
	p.before = nil
}

// Close ends the publisher. Workers keep the last version. Buffers are invalid afterwards.
func (p *Publisher) Close() error {
	if p.life.Err() != nil {
		return nil
	}
	p.close()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.forget()
	p.live.Close()
	return nil
}

// View is the weights of one version, valid until Exit.
type View struct {
	Version shm.Version
	Tensors []tensor.Spec
	w       *attach.Weights
	buffer  int
}

// Tensor is the memory of the k-th tensor, to read.
func (v View) Tensor(k int) []byte { return v.w.Tensor(v.buffer, k) }

// Follower follows the weights of a model.
type Follower struct {
	attachment
	load func(View) error

	mu      sync.Mutex
	left    sync.Cond // the last batch of a version has ended
	next    *attach.Weights
	now     View  // that load was called with; its w is next, or the one before while next has no version
	running int   // batches with now
	refusal error // by the broker that runs now
}

// Follow waits until the weights of a model are published, and calls load with the first
// version. Enter calls load again before the first batch of each later version. load may
// copy the tensors, or keep the View, whose memory is valid while batches run.
//
// If load fails, the version is withdrawn, and the one before is loaded again.
func Follow(ctx context.Context, model string, load func(View) error, opts ...Option) (*Follower, error) {
	f := &Follower{load: load}
	f.attachment = attachment{model: model, failed: f.failed}
	f.left.L = &f.mu
	worth := func(err error) bool {
		return errors.Is(err, status.ErrUnknownModel) || errors.Is(err, status.ErrNoBroker) || errors.Is(err, status.ErrBrokerGone)
	}
	if err := f.begin(ctx, worth, opts, f.use); err != nil {
		return nil, err
	}
	for !f.hasVersion() {
		select {
		case <-ctx.Done():
			f.Close()
			return nil, fmt.Errorf("%w: no version of the weights of %q: %w", status.ErrTimeout, model, ctx.Err())
		case <-time.After(time.Millisecond):
		}
	}
	if _, err := f.Enter(); err != nil {
		f.Close()
		return nil, err
	}
	f.Exit()
	return f, nil
}

func (f *Follower) use(w *attach.Weights) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.next != nil && f.next != f.now.w {
		f.next.Close()
	}
	f.next, f.refusal = w, nil
}

// failed keeps the errors after which the worker would go on with old weights for ever.
func (f *Follower) failed(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.refusal = nil; errors.Is(err, status.ErrForbidden) || errors.Is(err, status.ErrQuota) || errors.Is(err, status.ErrInvalid) {
		f.refusal = err
	}
}

func (f *Follower) hasVersion() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	v, _ := f.next.InForce()
	return v > 0
}

// Enter begins a batch with the version in force, which it loads if need be. While other
// batches run with an older version, it waits for them. Every Enter without an error needs an Exit.
func (f *Follower) Enter() (View, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case f.life.Err() != nil:
		return View{}, status.ErrClosed
	case f.refusal != nil:
		return View{}, fmt.Errorf("weights of %q after a restart of the broker: %w", f.model, f.refusal)
	}
	for f.running > 0 && !f.isCurrent() {
		f.left.Wait()
	}
	if f.running == 0 {
		if err := f.switchOver(); err != nil {
			return View{}, err
		}
	}
	f.running++
	return f.now, nil
}

// isCurrent reports whether now is the version in force.
func (f *Follower) isCurrent() bool {
	v, _ := f.next.InForce()
	if v == 0 {
		v, _ = f.now.w.InForce()
		return v == f.now.Version
	}
	return f.now.w == f.next && v == f.now.Version
}

// switchOver acquires the version in force, and loads it if it is another one.
func (f *Follower) switchOver() error {
	for {
		w := f.next
		v, buffer := w.Acquire(w.Follower)
		if v == 0 && f.now.w != nil { // a new broker waits for its publisher
			w = f.now.w
			v, buffer = w.Acquire(w.Follower)
		}
		switch {
		case v == 0:
			_, reason := w.Refused()
			return fmt.Errorf("%w: no version of the weights of %q is in force: %s", status.ErrFailed, f.model, reason)
		case f.now.w == w && f.now.Version == v:
			return nil
		}
		err := f.load(View{v, w.Tensors, w, buffer})
		if f.now.w != nil && f.now.w != w {
			f.now.w.Close()
		}
		if f.now = (View{w: w}); err == nil {
			f.now = View{v, w.Tensors, w, buffer}
			w.SetLoaded(w.Follower, v)
			return nil
		}
		w.Refuse(v, buffer, err.Error())
		slog.Warn("weights withdrawn: they cannot be loaded", "model", f.model, "version", v, "reason", err)
	}
}

// Exit ends a batch.
func (f *Follower) Exit() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.running--; f.running > 0 {
		return
	}
	f.now.w.Release(f.now.w.Follower)
	f.left.Broadcast()
}

// Close ends the follower. No batch may run. Views are invalid afterwards.
func (f *Follower) Close() error {
	if f.life.Err() != nil {
		return nil
	}
	f.close()
	f.mu.Lock()
	defer f.mu.Unlock()
	f.next.Close()
	if f.now.w != nil {
		f.now.w.Close()
	}
	return nil
}
