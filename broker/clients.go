package broker

import (
	"fmt"

	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
)

// clientSession is one attached client.
type clientSession struct {
	*peer
	ring    *ring
	first   uint32 // its window
	window  int
	commits shm.Consumer[shm.Commit]
	last    uint32 // where its last request began
	busy    int    // requests queued, running or held
	left    bool   // gone; the window returns when busy is zero
	unread  bool   // its turn was over before its ring was empty: it has another next round
}

// owns says whether a commit's slots are all inside the client's window.
func (c *clientSession) owns(e *shm.Commit) bool {
	return e.Rows >= 1 && e.Slot >= c.first && uint64(e.Slot)+uint64(e.Rows) <= uint64(c.first)+uint64(c.window)
}

// openClient makes the session of a client, before it is attached: not on the
// loop, since what it costs grows with the window.
func (r *ring) openClient(p *peer, window int) error {
	if window < 0 || window > r.layout.Slots {
		return fmt.Errorf("%w: window of %d slots, the ring has %d; ask for fewer, or raise the model's slots", status.ErrRingFull, window, r.layout.Slots)
	}
	if window == 0 { // chosen later, and as small a session does for every window up to this
		window = defaultWindow
	}
	return p.open(r, shm.KindClient, shm.ClientSegmentSize(window))
}

// attachClient leases a window to a client whose session is open. On an error
// the session is still the caller's.
func (r *ring) attachClient(p *peer, window int) (*clientSession, error) {
	first, window, err := r.leaseWindow(p.uid, window)
	if err != nil {
		return nil, err
	}
	r.leased[p.uid] += window
	c := &clientSession{peer: p, ring: r, first: first, window: window, last: first}
	c.commits = shm.NewConsumer(shm.CommitRing(p.seg, window))
	// All slots of the window start from one generation, later than any that
	// a former owner used.
	gen := r.slots[first].gen
	for s := first; s < first+uint32(window); s++ {
		if int32(r.slots[s].gen-gen) > 0 {
			gen = r.slots[s].gen
		}
	}
	for s := first; s < first+uint32(window); s++ {
		r.slots[s] = slotInfo{gen: gen}
		r.board.Reset(s, gen)
	}
	if err := p.watch(r.loop, func() { r.readCommits(c) }, func() { r.clientLeft(c, "its process ended") }); err != nil {
		r.takeBack(c)
		return nil, err
	}
	r.clients[c] = struct{}{}
	r.stage.clientJoined(c)
	c.commits.Arm()
	r.log.Debug("client attached", "client", c.label(), "pid", c.pid, "window", window, "first", first)
	return c, nil
}

// A client that leaves its window open gets defaultWindow slots, but not more
// than a share of those that are free: in a ring of few large slots the first
// clients leave something for the later ones.
const (
	defaultWindow = 8
	windowShare   = 8
)

// leaseWindow finds consecutive free slots for a user: as many as were asked
// for, or, for 0, as many as fit.
func (r *ring) leaseWindow(uid, asked int) (first uint32, window int, err error) {
	window = asked
	has, most := r.leased[uid], r.limits.share(r.layout.Slots)
	if asked == 0 {
		window = min(max(min(r.windows.free, most-has)/windowShare, 1), defaultWindow)
	}
	if has+window > most && most < r.layout.Slots {
		return 0, 0, fmt.Errorf("%w: uid %d has %d of %d slots, and %d more are wanted; one user may have %d (user_share is %d %%)",
			status.ErrQuota, uid, has, r.layout.Slots, window, most, r.limits.UserShare)
	}
	for ; ; window /= 2 {
		if first, ok := r.windows.lease(window); ok {
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
		status.ErrRingFull, max(asked, 1), len(r.clients), r.windows.free, r.layout.Slots, help)
}

// firstGen is the generation before the client's first.
func (c *clientSession) firstGen() uint32 { return c.ring.slots[c.first].gen }

// A client is read for one turn per round, so that one that never stops, or
// whose entries come to nothing, does not keep the loop from the others. A turn
// is as many rows as fill a batch, between these limits; an entry that is no
// request counts as a row.
const (
	leastTurn = 128
	mostTurn  = 1024
)

// readCommits is one turn of a client.
func (r *ring) readCommits(c *clientSession) {
	if c.left || c.unread {
		return
	}
	r.stage.touch()
	// What workers have finished is read first: otherwise a client that sends
	// its next request with the answer would seem to have one more in flight,
	// and from then on could join, and wait for itself.
	r.stage.catchUpForClient()
	for turn := min(max(leastTurn, r.layout.MaxBatch), mostTurn); turn > 0; {
		n, err := c.commits.Pending()
		for ; n > 0 && turn > 0 && err == nil; n-- {
			var e shm.Commit
			c.commits.Take(&e)
			turn -= int(max(1, r.rowsOf(&e)))
			err = r.readCommit(c, &e)
		}
		if err != nil {
			r.log.Warn("client disconnected: it broke the protocol", "client", c.label(), "pid", c.pid, "reason", err)
			r.stage.stats.offenders++
			r.loop.outside.offended(c.process)
			r.clientLeft(c, err.Error())
			return
		}
		c.commits.Give()
		if n == 0 && c.commits.Arm() {
			return
		}
	}
	r.loop.readAgain(c)
}

func (r *ring) readCommit(c *clientSession, e *shm.Commit) error {
	switch e.Kind {
	case shm.KindCommit:
		r.catchUpWith(c, e)
		if err := r.check(c, e); err != nil {
			return err
		}
		r.enter(c, e)
		return nil
	case shm.KindCancel:
		return r.cancel(c, e)
	}
	return fmt.Errorf("%w: entry of kind %d", status.ErrProtocol, e.Kind)
}

// enter takes a checked commit into the books and gives it to the stage.
func (r *ring) enter(c *clientSession, e *shm.Commit) {
	info := &r.slots[e.Slot]
	info.gen, info.commit, info.client, info.stage, info.attempts, info.hangs = e.Gen, *e, c, r.stage, 0, 0
	info.commit.Rows = r.rowsOf(e)
	if info.unserved { // the text is of the request before
		info.unserved = false
		r.board.SetReason(e.Slot, "")
	}
	r.setState(e.Slot, queued)
	c.busy++
	c.last = e.Slot
	if code := r.stage.arrive(e.Slot, e.Rows); code != status.OK {
		r.end(e.Slot, code, "", false)
		r.free(e.Slot)
	}
}

// cancel ends a request that its client no longer wants. A cancel that comes
// after the end is nothing; one for a slot or generation that never was is a
// violation.
func (r *ring) cancel(c *clientSession, e *shm.Commit) error {
	if e.Slot < c.first || e.Slot >= c.first+uint32(c.window) || int32(e.Gen-r.slots[e.Slot].gen) > 0 {
		return fmt.Errorf("%w: cancel of slot %d generation %d", status.ErrProtocol, e.Slot, e.Gen)
	}
	info := &r.slots[e.Slot]
	if info.gen != e.Gen || info.state == idle || info.head != e.Slot {
		return nil
	}
	switch info.state {
	case queued:
		info.stage.withdraw(e.Slot)
		r.end(e.Slot, status.ErrCanceled, "", false)
		r.free(e.Slot)
	case running:
		r.endRunning(e.Slot, status.ErrCanceled)
	}
	return nil
}

// clientLeft cleans up after a client that closed, died, or was thrown out.
// What it had queued is canceled; what runs keeps its slots until the worker
// is done; then the window returns.
//
// In docs/model: ClientLeft.
func (r *ring) clientLeft(c *clientSession, why string) {
	if c.left {
		return
	}
	r.stage.clientLeft(c)
	for s := c.first; s < c.first+uint32(c.window); s++ {
		if r.slots[s].state == running && r.slots[s].head == s {
			r.endRunning(s, status.ErrCanceled)
		}
	}
	c.left = true
	delete(r.clients, c)
	c.close(r.loop)
	r.log.Debug("client left", "client", c.label(), "pid", c.pid, "why", why)
	if c.busy == 0 {
		r.returnWindow(c)
	}
}

func (r *ring) returnWindow(c *clientSession) {
	r.takeBack(c)
	r.log.Debug("window returned", "client", c.label(), "pid", c.pid, "window", c.window)
	r.vacated()
}

// takeBack frees a client's window.
func (r *ring) takeBack(c *clientSession) {
	r.windows.giveBack(c.first, c.window)
	if r.leased[c.uid] -= c.window; r.leased[c.uid] == 0 {
		delete(r.leased, c.uid)
	}
}
