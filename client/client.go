// SPDX-License-Identifier: Apache-2.0

package client

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ringbatch/ringbatch/internal/attach"
	"github.com/ringbatch/ringbatch/internal/control"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

// Client is a connection to one model. It is safe for many goroutines.
type Client struct {
	model string
	opts  options

	live atomic.Pointer[link]  // the same as link, for those who only want that
	info atomic.Pointer[Model] // of the latest link: a broker may come back with another policy

	dialed *tensor.Signature // what Dial found: Claim is for this one

	mu     sync.Mutex
	link   *link         // nil while there is no broker
	change chan struct{} // closed and replaced whenever link or err changes
	err    error         // set once: closed, or the model is not what it was
	why    error         // why it could not attach again; nil while there is a link

	closing context.CancelFunc
	done    sync.WaitGroup // the goroutines that watch its links
}

// Model describes what a client is attached to.
type Model struct {
	Name         string
	Signature    tensor.Signature
	MaxBatchSize int           // rows
	Window       int           // slots this client may have in use at once
	WaitTime     time.Duration // policy.Auto: the broker chooses it
	Levels       int           // priority levels
	Slots        int           // of the whole ring
}

type options struct {
	socket string
	window int
	least  int // 0: window
	name   string
	wait   bool
	timing bool
	yields bool
	memory shm.Memory

	retry    bool
	retryFor time.Duration
}

// Option changes how Dial connects.
type Option func(*options)

// WithSocket names the broker's socket; the default is $RINGBATCH_SOCKET, or
// broker.sock in the user's runtime folder.
func WithSocket(path string) Option { return func(o *options) { o.socket = path } }

// WithWindow asks for that many slots: the rows that this client may have in
// use at once. By default (0) the broker chooses: 8, or fewer in a small ring.
func WithWindow(slots int) Option { return func(o *options) { o.window = slots } }

// WithLeastWindow accepts a smaller window, down to that many slots, where the
// ring or the user's quota has no room for WithWindow's. It holds as well when
// the client attaches again after a restart of the broker.
func WithLeastWindow(slots int) Option { return func(o *options) { o.least = slots } }

// WithName names this client in the broker's log and statistics.
func WithName(name string) Option { return func(o *options) { o.name = name } }

// WaitForModel makes Dial wait, within its context, for a broker that is not
// there yet and for a model that no worker has registered yet.
func WaitForModel() Option { return func(o *options) { o.wait = true } }

// WithTiming makes Request.Timing tell Write too, at the price of
// reading the clock once more per request.
func WithTiming() Option { return func(o *options) { o.timing = true } }

// WithYield lets other goroutines run before one parks to wait for an answer,
// also where no others wait on this client, which is when it is done anyway. It
// is for servers, where many goroutines are ready at any time; elsewhere it costs
// more than it saves.
func WithYield() Option { return func(o *options) { o.yields = true } }

// WithMemory replaces shared memory, for tests.
func WithMemory(m shm.Memory) Option { return func(o *options) { o.memory = m } }

// Re-attaching backs off between these.
const (
	firstRetry = 5 * time.Millisecond
	lastRetry  = 500 * time.Millisecond
)

// Dial attaches to a model of the broker, or to an alias: then to one of the
// models that it stands for, and to others whenever it stands for others. What
// is claimed by then ends where it was claimed, so nothing is lost. The context
// bounds the dialling, not the client's life.
//
// If the name stands for another signature later, Infer, InferInto and Fill go
// on with what fits that; Claim, whose caller knows the tensors, and inputs that
// do not fit get ErrSignatureMismatch, until it is the former one again.
func Dial(ctx context.Context, model string, opts ...Option) (*Client, error) {
	o := options{memory: shm.Memfd{}}
	for _, f := range opts {
		f(&o)
	}
	o.socket = control.SocketPath(o.socket)
	if o.window < 0 || o.window > shm.MaxSlots {
		return nil, fmt.Errorf("%w: window of %d slots, must be 0 (what fits)..%d", status.ErrInvalid, o.window, shm.MaxSlots)
	}
	c := &Client{model: model, opts: o, change: make(chan struct{})}
	delay := firstRetry
	var last error // why it could not attach before
	for {
		l, err := c.attach(ctx)
		if last != nil && err != nil && ctx.Err() != nil {
			return nil, fmt.Errorf("dial %s: %w (%w)", model, last, err)
		}
		if last = err; err == nil {
			c.use(l)
			c.dialed = &l.info.Signature
			break
		}
		if !o.wait || !worthWaiting(err) {
			return nil, fmt.Errorf("dial %s: %w", model, err)
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("dial %s: %w (%w)", model, err, ctx.Err())
		case <-time.After(delay):
			delay = min(2*delay, lastRetry)
		}
	}
	life, cancel := context.WithCancel(context.Background())
	c.closing = cancel
	first := c.link
	c.done.Go(func() { c.keep(life, first) })
	return c, nil
}

// worthWaiting tells whether a broker that is about to come, or its first
// worker, may change that; one that drains is being replaced, and one that
// accepts nobody may do so again.
func worthWaiting(err error) bool {
	for _, e := range []error{status.ErrUnknownModel, status.ErrNoBroker, status.ErrBrokerGone, status.ErrDraining, status.ErrTimeout} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// attach attaches to the model that the name stands for now: to one of the
// signature that the client has, if there is one.
func (c *Client) attach(ctx context.Context) (*link, error) {
	for window := c.opts.window; ; window = max(c.opts.least, window/2) {
		l, err := c.attachWindow(ctx, window)
		noRoom := errors.Is(err, status.ErrRingFull) || errors.Is(err, status.ErrQuota)
		if !noRoom || c.opts.least == 0 || window <= c.opts.least {
			return l, err
		}
	}
}

func (c *Client) attachWindow(ctx context.Context, window int) (*link, error) {
	req := control.Request{Op: control.OpClient, Model: c.model, Name: c.opts.name, Window: window, Follows: true, Times: true}
	if info := c.info.Load(); info != nil {
		req.Inputs, req.Outputs = tensor.SpecTexts(info.Signature.Inputs), tensor.SpecTexts(info.Signature.Outputs)
	}
	s, err := attach.Open(ctx, c.opts.socket, c.opts.memory, &req)
	if errors.Is(err, status.ErrSignatureMismatch) {
		req.Inputs, req.Outputs = nil, nil
		s, err = attach.Open(ctx, c.opts.socket, c.opts.memory, &req)
	}
	if err != nil {
		return nil, err
	}
	l, err := newLink(s)
	if err != nil {
		s.Close()
		return nil, err
	}
	l.timing, l.wait.yields = c.opts.timing, c.opts.yields
	return l, nil
}

// keep watches the connection. When the broker goes, it ends what was in
// flight and attaches again: a new broker is a new epoch with new segments. When
// the broker says that the client should attach again, it does so while the old
// link goes on.
func (c *Client) keep(life context.Context, l *link) {
	for {
		c.done.Go(l.watch)
		var next *link
		select {
		case <-l.again:
			next = c.attachUntil(life, l.gone)
		case <-l.gone:
		}
		if next == nil {
			c.set(nil, nil) // first: a caller that learns that the link is dead does not find it here
			l.fail()
			l.drop()
			if next = c.attachUntil(life, nil); next == nil {
				return
			}
			l = nil
		}
		if !c.set(next, nil) { // closed meanwhile
			next.fail()
			next.drop()
			if l != nil {
				<-l.gone
				l.fail()
				l.drop()
			}
			return
		}
		if l != nil {
			c.retire(life, l)
		}
		l = next
	}
}

// attachUntil tries until it is attached again; nil if the client was closed, or
// gone before.
func (c *Client) attachUntil(life context.Context, gone <-chan struct{}) *link {
	for delay := firstRetry; ; delay = min(2*delay, lastRetry) {
		l, err := c.attach(life)
		if err == nil && life.Err() == nil {
			return l
		}
		if err == nil {
			l.drop()
		}
		if gone == nil {
			c.mu.Lock()
			c.why = err
			c.mu.Unlock()
		}
		select {
		case <-life.Done():
			return nil
		case <-gone:
			return nil
		case <-time.After(delay):
		}
	}
}

// retire lets a link end with the last of its requests.
func (c *Client) retire(life context.Context, l *link) {
	l.retire()
	c.done.Go(func() {
		select {
		case <-l.gone: // all are released, or the broker has gone
		case <-life.Done():
			l.session.StopWatching()
			<-l.gone
		}
		l.fail()
		l.unretire()
	})
}

// set publishes a new link or a final error; false if the client has its
// final error already.
func (c *Client) set(l *link, err error) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return false
	}
	c.err, c.why = err, nil
	c.use(l)
	close(c.change)
	c.change = make(chan struct{})
	return true
}

// use makes l, which may be nil, the present link. The caller holds mu.
func (c *Client) use(l *link) {
	c.link = l
	c.live.Store(l)
	if l != nil { // after live: who sees this model claims of it
		c.info.Store(l.info)
	}
}

// Close detaches. What is in flight ends with ErrClosed or ErrBrokerGone;
// views of requests that were not released yet stay valid until they are. The
// window goes back to the broker with the last of them.
func (c *Client) Close() error {
	c.mu.Lock()
	l := c.link
	c.mu.Unlock()
	if !c.set(nil, status.ErrClosed) {
		return nil
	}
	c.closing()
	if l != nil {
		l.session.StopWatching()
	}
	c.done.Wait()
	return nil
}

// present is the model that requests go to now, or went to last.
func (c *Client) present() *Model {
	if l := c.live.Load(); l != nil {
		return l.info
	}
	return c.info.Load()
}

// Model describes the model, as the broker has it that the client is, or was
// last, attached to.
func (c *Client) Model() Model { return *c.info.Load() }

// current gives the link; if wait, also after waiting for a broker that is
// being restarted.
func (c *Client) current(ctx context.Context, wait bool) (*link, error) {
	if l := c.live.Load(); l != nil && l.tryHold() {
		return l, nil
	}
	for {
		c.mu.Lock()
		l, err, change := c.link, c.err, c.change
		if l != nil && err == nil {
			l.hold()
		}
		c.mu.Unlock()
		if err != nil {
			return nil, err
		}
		if l != nil {
			return l, nil
		}
		if !wait {
			return nil, &ended{status: status.ErrBrokerGone}
		}
		select {
		case <-change:
		case <-ctx.Done():
			c.mu.Lock()
			why := c.why
			c.mu.Unlock()
			if why != nil {
				return nil, fmt.Errorf("%w: attaching again: %w (%w)", status.ErrBrokerGone, why, ctx.Err())
			}
			return nil, fmt.Errorf("%w (%w)", status.ErrBrokerGone, ctx.Err())
		}
	}
}
