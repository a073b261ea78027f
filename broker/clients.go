package broker

import (
	"errors"
	"fmt"
	"time"

	"github.com/ringbatch/ringbatch/broker/batcher"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
)

// clientSession is one attached client.
type clientSession struct {
	*peer
	model   *model
	first   uint32 // its window
	window  int
	commits shm.Consumer[shm.Commit]
	last    uint32 // where its last request began
	busy    int    // requests queued, running or held
	left    bool   // gone; the window returns when busy is zero
}

// attachClient leases a window and makes the session.
func (m *model) attachClient(p *peer, window int) (*clientSession, error) {
	first, window, err := m.leaseWindow(window)
	if err != nil {
		return nil, err
	}
	if err := p.open(m, shm.KindClient, shm.ClientSegmentSize(window)); err != nil {
		m.windows.giveBack(first, window)
		return nil, err
	}
	c := &clientSession{peer: p, model: m, first: first, window: window, last: first}
	c.commits = shm.NewConsumer(shm.CommitRing(p.seg, window))
	// All slots of the window start from one generation, later than any that
	// a former owner used.
	gen := m.slots[first].gen
	for s := first; s < first+uint32(window); s++ {
		if int32(m.slots[s].gen-gen) > 0 {
			gen = m.slots[s].gen
		}
	}
	for s := first; s < first+uint32(window); s++ {
		m.slots[s] = slotInfo{gen: gen}
		m.board.Reset(s, gen)
	}
	if err := p.listen(m.b, func() { m.readCommits(c) }, func() { m.clientLeft(c, "its process ended") }); err != nil {
		m.windows.giveBack(first, window)
		p.close(m.b)
		return nil, err
	}
	m.clients[c] = struct{}{}
	m.batcher.ClientJoined(batcher.ClientID(first))
	m.touch()
	c.commits.Arm()
	m.log.Debug("client attached", "client", c.label(), "pid", c.pid, "window", window, "first", first)
	return c, nil
}

// A client that leaves its window open gets defaultWindow slots, but not more
// than a share of those that are free: in a ring of few large slots the first
// clients leave something for the later ones.
const (
	defaultWindow = 8
	windowShare   = 8
)

// leaseWindow finds consecutive free slots: as many as were asked for, or, for
// 0, as many as fit.
func (m *model) leaseWindow(asked int) (first uint32, window int, err error) {
	if asked < 0 || asked > m.layout.Slots {
		return 0, 0, fmt.Errorf("%w: window of %d slots, the ring has %d; ask for fewer, or raise the model's slots", status.ErrRingFull, asked, m.layout.Slots)
	}
	window = asked
	if asked == 0 {
		window = min(max(m.windows.free()/windowShare, 1), defaultWindow)
	}
	for ; ; window /= 2 {
		if first, ok := m.windows.lease(window); ok {
			return first, window, nil
		}
		if asked > 0 || window <= 1 {
			break
		}
	}
	help := "raise the model's slots, or let clients have smaller windows"
	if asked > 1 {
		help = "ask for a smaller window (0: what fits), or raise the model's slots"
	}
	return 0, 0, fmt.Errorf("%w: %d wanted in a row; %d clients have all but %d of %d slots; %s",
		status.ErrRingFull, max(asked, 1), len(m.clients), m.windows.free(), m.layout.Slots, help)
}

// firstGen is the generation before the client's first.
func (c *clientSession) firstGen() uint32 { return c.model.slots[c.first].gen }

// maxClockSkew bounds how far back a commit may claim to have happened.
const maxClockSkew = time.Second

// maxReads is how often a client's ring is read before others have their turn.
const maxReads = 4

// readCommits takes everything the client has committed.
func (m *model) readCommits(c *clientSession) {
	if c.left {
		return
	}
	m.touch()
	// What workers have finished is read first: otherwise a client that sends
	// its next request with the answer would seem to have one more in flight,
	// and from then on could join, and wait for itself.
	m.drainAllDone()
	for range maxReads {
		n, err := c.commits.Pending()
		for range n {
			var e shm.Commit
			c.commits.Take(&e)
			if err = m.readCommit(c, &e); err != nil {
				break
			}
		}
		if err != nil {
			m.log.Warn("client disconnected: it broke the protocol", "client", c.label(), "pid", c.pid, "reason", err)
			m.stats.offenders++
			m.b.offenders.add(c.pid)
			m.clientLeft(c, err.Error())
			return
		}
		c.commits.Give()
		if c.commits.Arm() {
			return
		}
	}
	m.b.loop.post(func() { m.readCommits(c) }) // it never stops: others' turn
}

func (m *model) readCommit(c *clientSession, e *shm.Commit) error {
	switch e.Kind {
	case shm.KindCommit:
		if err := m.accept(c, e); err != nil {
			return err
		}
		if m.slots[c.last].state != idle {
			m.endedEarly(c.last) // its answer is there before the worker's "done"
		}
		m.enqueue(c, e)
		c.last = e.Slot
		return nil
	case shm.KindCancel:
		return m.cancel(c, e)
	}
	return fmt.Errorf("%w: entry of kind %d", status.ErrProtocol, e.Kind)
}

// enqueue takes a checked commit into the books and gives it to the batcher.
func (m *model) enqueue(c *clientSession, e *shm.Commit) {
	info := &m.slots[e.Slot]
	info.gen, info.commit, info.client, info.attempts = e.Gen, *e, c, 0
	m.setState(e.Slot, queued)
	c.busy++
	m.stats.requests++
	now := m.b.now
	m.arrived = now
	// A commit from the future, or from long ago, would bend the wait time of
	// others; the client's clock is ours, so this is only damage.
	info.commit.Committed = min(max(e.Committed, now-int64(maxClockSkew)), now)
	if at := m.cfg.Policy.Deadline(int(e.Level), batcher.Time(info.commit.Committed), deadlineOf(e)); at != batcher.Never {
		info.commit.Deadline = int64(at)
	}
	code := status.OK
	if m.b.draining {
		code = status.ErrDraining
	} else {
		code = arriveStatus(m.batcher.Arrive(batcher.Time(now), m.request(e.Slot)))
	}
	if code != status.OK {
		m.end(e.Slot, code, "", false)
		m.free(e.Slot)
	}
}

// request is what the batcher needs to know of the request at head.
func (m *model) request(head uint32) batcher.Request {
	info := &m.slots[head]
	dims := info.commit.Dims
	if m.cfg.Ragged {
		dims = batcher.Dims{} // all sizes are one shape
	}
	return batcher.Request{
		ID: batcher.RequestID(head), Client: batcher.ClientID(info.client.first), Rows: int(info.commit.Rows), Level: int(info.commit.Level),
		Arrived: batcher.Time(info.commit.Committed), Deadline: deadlineOf(&info.commit), Dims: dims, Alone: info.attempts > 0,
	}
}

func deadlineOf(e *shm.Commit) batcher.Time {
	if e.Deadline > 0 {
		return batcher.Time(e.Deadline)
	}
	return batcher.Never
}

func arriveStatus(err error) status.Code {
	switch {
	case err == nil:
		return status.OK
	case errors.Is(err, batcher.ErrTooLarge):
		return status.ErrTooLarge
	case errors.Is(err, batcher.ErrQueueFull):
		return status.ErrQueueFull
	case errors.Is(err, batcher.ErrNoLevel):
		return status.ErrNoLevel
	case errors.Is(err, batcher.ErrExpired):
		return status.ErrExpired
	case errors.Is(err, batcher.ErrTooLong):
		return status.ErrShape
	}
	return status.ErrInvalid
}

// cancel ends a request that its client no longer wants. A cancel that comes
// after the end is nothing; one for a slot or generation that never was is a
// violation.
func (m *model) cancel(c *clientSession, e *shm.Commit) error {
	if e.Slot < c.first || e.Slot >= c.first+uint32(c.window) || int32(e.Gen-m.slots[e.Slot].gen) > 0 {
		return fmt.Errorf("%w: cancel of slot %d generation %d", status.ErrProtocol, e.Slot, e.Gen)
	}
	info := &m.slots[e.Slot]
	if info.gen != e.Gen || info.state == idle || info.head != e.Slot {
		return nil
	}
	switch info.state {
	case queued:
		m.batcher.Cancel(batcher.RequestID(e.Slot))
		m.end(e.Slot, status.ErrCanceled, "", false)
		m.free(e.Slot)
	case running:
		m.endRunning(e.Slot, status.ErrCanceled)
	}
	return nil
}

// endRunning releases the caller of a request that a worker has: the slot is
// held until that worker is through with its batch.
//
// In docs/model: EndRunning.
func (m *model) endRunning(head uint32, s status.Code) {
	m.end(head, s, "", true)
	m.hold(head)
}

// hold marks a running request as ended: its slots come back with its batch.
func (m *model) hold(head uint32) {
	m.setState(head, held)
	m.held++
}
