package client

import (
	"time"

	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/tensor"
)

// Lending a slot to code outside Go, for bindings (see shm.Express). The
// slot's states there:
//
//	free ── Lend ──► lent ── TakeBack, or the link dies ──► free
//	                  └───── Adopt: its request goes on as one of ours ──► committed

// WithExpress names the place through which Lend lends.
func WithExpress(x *shm.Express) Option { return func(o *options) { o.express = x } }

// Lend lends a slot, if one is free and none is lent.
func (c *Client) Lend() {
	x := c.opts.express
	if x == nil || x.Lent.Load() == 1 { // a guess: it is looked at again below
		return
	}
	sig := &c.info.Load().Signature
	if tensor.VariableDims(sig.Inputs)+tensor.VariableDims(sig.Outputs) > 0 || len(sig.Inputs) > shm.ExpressTensors || len(sig.Outputs) > shm.ExpressTensors {
		return
	}
	l := c.live.Load()
	if l == nil || !l.tryHold() {
		return
	}
	if !x.TryEnter() {
		l.drop()
		return
	}
	defer func() { // as who leaves it in C
		x.Leave()
		if x.Wanted.Load() == 1 {
			l.takeBack(x)
		}
	}()
	// A link that dies sets dead, then enters to take the slot back: it finds
	// what we lend, or we find it dead.
	if x.Lent.Load() == 0 && !l.dead.Load() {
		l.mu.Lock()
		at, ok := 0, false
		if c.claimers.Load() == 0 { // nobody waits for a slot
			at, ok = l.take(1)
		}
		l.mu.Unlock()
		if ok {
			l.slots[at].state = slotLent
			x.Doorbell = l.session.Doorbell
			x.Lend(l.session.Layout, l.session.Planes, l.board, l.commits.Ring, l.first+uint32(at), l.first, l.gens[at])
			l.lent, c.lender = true, l
			return
		}
	}
	l.drop()
}

// TakeBack ends the lending, if nobody is using the slot; otherwise who does
// calls this when he is through.
func (c *Client) TakeBack() {
	if l := c.live.Load(); c.opts.express != nil && l != nil && l.tryHold() {
		l.takeBack(c.opts.express)
		l.drop()
	}
}

func (l *link) takeBack(x *shm.Express) {
	// Wanted, then try; who leaves leaves, then looks at wanted: one of us
	// sees the other.
	x.Wanted.Store(1)
	if x.TryEnter() {
		if l.lent || x.Lent.Load() == 0 { // not the slot of the link that came after us
			x.Wanted.Store(0)
		}
		l.unlend(x)
		x.Leave()
	}
}

// unlend frees the slot that this link has lent, if it has. The caller is
// inside.
func (l *link) unlend(x *shm.Express) {
	if !l.lent {
		return
	}
	l.lent = false
	x.Lent.Store(0)
	at := x.Slot - l.first
	l.mu.Lock()
	l.gens[at] = x.Gen
	l.slots[at].state, l.slots[at].rows = slotFree, 1
	l.giveBack(int(at), 1)
	l.mu.Unlock()
	l.drop()
}

// endExpress takes the slot back from a link that has died, and leaves the
// express to the link that comes after it. Whoever waits there sees it dead,
// and comes to Adopt.
func (l *link) endExpress() {
	l.mu.Lock()
	x := l.express
	l.mu.Unlock()
	if x == nil {
		return
	}
	x.Dead.Store(1)
	for !x.TryEnter() {
		l.bell.Wake() // one that comes before the wait is lost, hence the loop
		time.Sleep(20 * time.Microsecond)
	}
	l.unlend(x)
	l.mu.Lock()
	l.commits.Unshare(x)
	l.express = nil
	l.mu.Unlock()
	x.Leave()
}

// Adopt makes the request that was committed through the lent slot one of
// ours: it was not through in time, or did not end well. The caller is inside,
// and is not any more afterwards. Only with WithExpress.
func (c *Client) Adopt() Request {
	x, l := c.opts.express, c.lender
	l.lent = false
	x.Lent.Store(0)
	at := x.Slot - l.first
	s := &l.slots[at]
	l.mu.Lock()
	l.gens[at] = x.Gen
	s.state, s.rows, s.level, s.cancel, s.notify = slotCommitted, 1, defaultLevel, false, false
	s.claimed, s.claimTook, s.committed = 0, 0, x.Committed
	l.mu.Unlock()
	r := Request{l, at, s.handle.Add(1)}
	x.Leave()
	return r
}
