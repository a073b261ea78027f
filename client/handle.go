package client

import (
	"context"

	"github.com/ringbatch/ringbatch/shm"
)

// Requests as plain numbers, for bindings to other languages: nothing to
// allocate, nothing to keep, and a number that is no longer valid is
// recognised.
//
//	63      52 51    32 31      0
//	+---------+--------+--------+
//	| link    | slot   | handle |
//	+---------+--------+--------+
//
// link is the attachment's number (a client attaches again when its broker
// was restarted), slot is counted from the window's first.
const (
	handleBits = 32
	slotBits   = 20
	linkMask   = 1<<(64-handleBits-slotBits) - 1

	_ = uint(1<<slotBits - shm.MaxSlots) // a window's slots fit
)

// ID is the request as a number. It is never 0.
func (r Request) ID() uint64 {
	if r.link == nil {
		return 0
	}
	return uint64(r.link.number&linkMask)<<(handleBits+slotBits) | uint64(r.at)<<handleBits | uint64(r.handle)
}

// RequestByID is the way back. A number that never was a request of this
// client, or was released, gives a Request that answers ErrReleased.
func (c *Client) RequestByID(id uint64) Request {
	number, at := uint32(id>>(handleBits+slotBits)), uint32(id>>handleBits)&(1<<slotBits-1)
	if id%2 == 0 { // as the handle of a slot that nobody has claimed
		return Request{}
	}
	for _, l := range *c.links.Load() {
		if l.number&linkMask == number && int(at) < len(l.slots) {
			return Request{l, at, uint32(id)}
		}
	}
	return Request{}
}

// CommitAllUntil is CommitAll with a deadline on shm.Now's clock; 0 is none.
func CommitAllUntil(requests []Request, deadline int64) error { return commit(requests, deadline) }

// Slot is the request's first slot in the ring.
func (r Request) Slot() uint32 { return r.link.first + r.at }

// Attachment tells which of the client's attachments the request belongs to:
// each has a mapping of its own.
func (r Request) Attachment() uint32 {
	if r.link == nil {
		return 0
	}
	return r.link.number
}

// Segment is the mapping that the request lies in, for as long as it is not
// released.
func (r Request) Segment() *shm.Segment { return r.link.session.Planes }

// remember lists a new attachment and forgets those without requests. Only
// the goroutine that attaches calls it.
func (c *Client) remember(l *link) {
	c.attached++
	l.number = c.attached
	links := []*link{l}
	if old := c.links.Load(); old != nil {
		for _, o := range *old {
			if o.refs.Load() > 0 {
				links = append(links, o)
			}
		}
	}
	c.links.Store(&links)
	if n := c.notifier.Load(); n != nil {
		l.startReaper(n)
	}
}

// ReleaseAll releases every request of the client, of all its attachments.
// Nobody may be using one meanwhile.
func (c *Client) ReleaseAll() {
	for _, l := range *c.links.Load() {
		for at := range l.slots {
			if s := &l.slots[at]; s.state == slotClaimed || s.state == slotCommitted || s.state == slotEnded {
				_ = Request{l, uint32(at), s.handle.Load()}.Release()
			}
		}
	}
}

// Mapping keeps the memory of an attachment's tensors mapped, for views that
// outlive their request.
type Mapping struct{ link *link }

// Map holds the mapping that the request lies in. Close it.
func (r Request) Map() (*Mapping, error) {
	if _, err := r.slot(); err != nil {
		return nil, err
	}
	r.link.hold()
	return &Mapping{r.link}, nil
}

// Map holds the mapping of the present attachment. Close it.
func (c *Client) Map() (*Mapping, error) {
	l, err := c.current(context.Background(), false)
	if err != nil {
		return nil, err
	}
	return &Mapping{l}, nil
}

// Layout is where each tensor lies in the mapping.
func (m *Mapping) Layout() *shm.Layout { return m.link.session.Layout }

// Segment is the mapping itself, to pin it for a GPU.
func (m *Mapping) Segment() *shm.Segment { return m.link.session.Planes }

// Attachment tells which requests lie in it.
func (m *Mapping) Attachment() uint32 { return m.link.number }

// Close gives it up, once.
func (m *Mapping) Close() { m.link.drop() }
