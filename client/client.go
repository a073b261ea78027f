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
	"github.com/ringbatch/ringbatch/internal/backoff"
	"github.com/ringbatch/ringbatch/internal/control"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

// Client is a connection to one model. It is safe for many goroutines.
type Client struct {
	model string
	opts  options

	live atomic.Pointer[link]  // a copy of link that is read without mu
	info atomic.Pointer[Model] // of the latest link: a restarted broker may have another policy

	dialed *tensor.Signature // the signature that Dial found; Claim serves no other

	mu     sync.Mutex
	link   *link         // nil while there is no broker
	change chan struct{} // closed and replaced whenever link or err changes
	err    error         // set once, by Close
	why    error         // why the client could not attach again; nil while there is a link

	closing context.CancelFunc
	done    sync.WaitGroup // goroutines that watch links
}

// Model describes the model that a client is attached to.
type Model struct {
	Name         string
	Signature    tensor.Signature
	MaxBatchSize int           // rows
	Window       int           // slots that this client may use at once
	WaitTime     time.Duration // policy.Auto if the broker chooses
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

	retry    bool
	retryFor time.Duration
}

// Option changes how Dial connects.
type Option func(*options)

// WithSocket: default $RINGBATCH_SOCKET, or the user's runtime folder.
func WithSocket(path string) Option { return func(o *options) { o.socket = path } }

// WithWindow sets the rows in use at once: one per goroutine, or more.
func WithWindow(slots int) Option { return func(o *options) { o.window = slots } }

// WithLeastWindow accepts a smaller window where there is no room.
func WithLeastWindow(slots int) Option { return func(o *options) { o.least = slots } }

// WithName names this client in the broker's log and statistics.
func WithName(name string) Option { return func(o *options) { o.name = name } }

// WaitForModel makes Dial try again while status.RetryAttach is true.
func WaitForModel() Option { return func(o *options) { o.wait = true } }

// WithTiming makes Request.Timing report Write, too.
func WithTiming() Option { return func(o *options) { o.timing = true } }

// Dial attaches to a model of the broker, or to an alias, within ctx. A client of an
// alias follows when the alias changes; requests end where they were claimed. Infer and
// Fill then take inputs of the new model's signature; Claim gets ErrSignatureMismatch
// until the alias is back at the old one.
func Dial(ctx context.Context, model string, opts ...Option) (*Client, error) {
	o := options{}
	for _, f := range opts {
		f(&o)
	}
	o.socket = control.SocketPath(o.socket)
	if o.window < 0 || o.window > shm.MaxSlots {
		return nil, fmt.Errorf("%w: window of %d slots, must be 0 (what fits)..%d", status.ErrInvalid, o.window, shm.MaxSlots)
	}
	c := &Client{model: model, opts: o, change: make(chan struct{})}
	var pause backoff.Backoff
	var last error // of the attempt before
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
		if !o.wait || !status.RetryAttach(err) {
			return nil, fmt.Errorf("dial %s: %w", model, err)
		}
		if !pause.Wait(ctx) {
			return nil, fmt.Errorf("dial %s: %w (%w)", model, err, ctx.Err())
		}
	}
	life, cancel := context.WithCancel(context.Background())
	c.closing = cancel
	first := c.link
	c.done.Go(func() { c.keepAttached(life, first) })
	return c, nil
}

// attach attaches to the model of that name. Of an alias's models it prefers one with
// the client's signature.
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
		req.State = tensor.SpecTexts(info.Signature.State)
	}
	s, err := attach.Open(ctx, c.opts.socket, &req)
	if errors.Is(err, status.ErrSignatureMismatch) {
		req.Inputs, req.Outputs, req.State = nil, nil, nil
		s, err = attach.Open(ctx, c.opts.socket, &req)
	}
	if err != nil {
		return nil, err
	}
	l, err := newLink(s)
	if err != nil {
		s.Close()
		return nil, err
	}
	l.timing = c.opts.timing
	return l, nil
}

// keepAttached watches the connection. When the broker goes away, keepAttached ends the
// requests in flight and attaches again: a new broker is a new epoch with new segments.
// When the broker asks the client to attach again, the old link serves until the new
// one is there.
func (c *Client) keepAttached(life context.Context, l *link) {
	for {
		c.done.Go(l.watch)
		var next *link
		select {
		case <-l.again:
			next = c.attachUntil(life, l.gone)
		case <-l.gone:
		}
		if next == nil {
			c.set(nil, nil) // first: a caller that sees a dead link must not find it here
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

// attachUntil tries until it is attached. It returns nil if the client is closed, or
// gone is closed, before that.
func (c *Client) attachUntil(life context.Context, gone <-chan struct{}) *link {
	var pause backoff.Backoff
	for {
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
		case <-time.After(pause.Next()):
		}
	}
}

// retire ends a link with the last of its requests.
func (c *Client) retire(life context.Context, l *link) {
	l.retire()
	c.done.Go(func() {
		select {
		case <-l.gone: // all requests are released, or the broker went away
		case <-life.Done():
			l.session.StopWatching()
			<-l.gone
		}
		l.fail()
		l.unretire()
	})
}

// set publishes a new link or a final error. It returns false if the client has its
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

// use makes l, which may be nil, the current link. The caller holds mu.
func (c *Client) use(l *link) {
	c.link = l
	c.live.Store(l)
	if l != nil { // after live: a goroutine that sees this model claims from this link
		c.info.Store(l.info)
	}
}

// Close detaches. Requests in flight end; views stay valid until Release.
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

// current is the model that requests go to now, or went to last.
func (c *Client) current() *Model {
	if l := c.live.Load(); l != nil {
		return l.info
	}
	return c.info.Load()
}

// Model describes the model of the latest attachment.
func (c *Client) Model() Model { return *c.info.Load() }

// holdLink returns the current link with a hold on it. If wait, it waits for a broker
// that is being restarted.
func (c *Client) holdLink(ctx context.Context, wait bool) (*link, error) {
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
