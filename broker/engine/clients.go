// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"fmt"
	"slices"

	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
)

// ClientSession is one attached client.
type ClientSession struct {
	*Peer
	ring    *Ring
	first   uint32 // slot of the window
	window  int    // slots
	commits shm.Consumer[shm.Commit]
	times   shm.ClientTimes // read by the recorder
	last    uint32          // the slot where its last request began
	busy    int             // requests queued, running or held
	state   clientState     // changed by moveTo only
	unread  bool            // in line for a turn
	latest  uint32          // the latest generation that it used
	before  uint32          // the generation before its first; never changes
}

// owns says whether a commit's slots are all inside the client's window.
func (c *ClientSession) owns(e *shm.Commit) bool {
	return e.Rows >= 1 && e.Slot >= c.first && uint64(e.Slot)+uint64(e.Rows) <= uint64(c.first)+uint64(c.window)
}

// hasSibling says that the process has another session.
func (c *ClientSession) hasSibling() bool {
	for x := range c.ring.clients {
		if x != c && x.Process == c.Process {
			return true
		}
	}
	return false
}

func (r *Ring) openClient(p *Peer, window int, times bool) error {
	if window < 0 || window > r.layout.Slots {
		return fmt.Errorf("%w: window of %d slots, the ring has %d; ask for fewer, or raise the model's slots",
			status.ErrRingFull, window, r.layout.Slots)
	}
	if window == 0 { // leaseWindow chooses, up to this
		window = DefaultWindow
	}
	return p.openSession(r, shm.KindClient, shm.ClientSegmentSize(window, times))
}

// newBooks makes enough chunks for a window, before the loop knows which ones the ring lacks.
func newBooks(window int) (chunks [][]slotInfo) {
	for n := chunkSlots; n < window+chunkSlots && window > chunkSlots; n += chunkSlots {
		chunks = append(chunks, make([]slotInfo, chunkSlots))
	}
	return chunks
}

// reserveWindow leases a window to an open session, which stays the caller's on an error.
func (r *Ring) reserveWindow(p *Peer, window int, chunks [][]slotInfo) (*ClientSession, error) {
	first, window, err := r.leaseWindow(p.UID, window)
	if err != nil {
		return nil, err
	}
	r.leased[p.UID] += window
	for k := int(first) / chunkSlots; k <= (int(first)+window-1)/chunkSlots; k++ {
		if r.books[k] != nil {
			continue
		}
		if n := len(chunks); n > 0 {
			r.books[k], chunks = chunks[n-1], chunks[:n-1]
		} else {
			r.books[k] = make([]slotInfo, chunkSlots)
		}
	}
	c := &ClientSession{Peer: p, ring: r, first: first, window: window, last: first, latest: r.base, before: r.base}
	c.commits = shm.NewConsumer(shm.CommitRing(p.seg, window))
	return c, nil
}

// resetWindow makes the slots new, with a generation later than any former one.
func (c *ClientSession) resetWindow() {
	for s := c.first; s < c.first+uint32(c.window); s++ {
		*c.ring.slot(s) = slotInfo{gen: c.latest}
		c.ring.board.Reset(s, c.latest)
	}
}

func (r *Ring) attachClient(c *ClientSession) error {
	if err := c.watchPeer(r.loop, func() { r.clientRang(c) }, func() { r.clientLeft(c, "its process ended") }); err != nil {
		return err
	}
	r.clients[c] = struct{}{}
	c.times.Want(slices.ContainsFunc(r.stages, func(s *Stage) bool { return s.recorder.takesMore() }))
	for _, s := range r.stages {
		s.clientJoined(c)
	}
	c.commits.Arm()
	r.log.Debug("client attached", "client", c.Label(), "pid", c.Pid, "window", c.window, "first", c.first)
	return nil
}

// A client that asks for no size gets DefaultWindow slots, but at most one part in
// windowShare of the free ones: a ring of few large slots keeps room for later clients.
const (
	DefaultWindow = 8
	windowShare   = 8
)

// leaseWindow finds consecutive free slots for a user; for 0, as many as fit.
func (r *Ring) leaseWindow(uid, asked int) (first uint32, window int, err error) {
	window = asked
	has, most := r.leased[uid], max(1, r.layout.Slots*r.share/100)
	if asked == 0 {
		window = min(max(min(r.windows.free, most-has)/windowShare, 1), DefaultWindow)
	}
	if has+window > most && most < r.layout.Slots {
		return 0, 0, fmt.Errorf("%w: uid %d has %d of %d slots, and %d more are wanted; one user may have %d (user_share is %d %%)",
			status.ErrQuota, uid, has, r.layout.Slots, window, most, r.share)
	}
	for ; ; window /= 2 {
		if first, ok := r.windows.leaseSlots(window); ok {
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

// clientLeft cleans up after a client that closed, died, or was thrown out. The loop
// cancels its queued requests, in turns if they are many. Running requests keep their
// slots until the worker is done. Then the window returns.
//
// In test/model: ClientLeft.
func (r *Ring) clientLeft(c *ClientSession, why string) {
	if !c.isAttached() {
		return
	}
	for _, s := range r.stages {
		s.touch()
		s.catchUp() // answers from before it left count
	}
	c.moveTo(clientLeaving)
	_, _ = c.commits.Pending() // SYNC POINT "leave": another client soon gets its window
	for _, s := range r.stages {
		s.recorder.readLastTimes(c)
		s.keepAccount(c)
	}
	delete(r.clients, c)
	c.closeSession(r.loop)
	r.log.Debug("client left", "client", c.Label(), "pid", c.Pid, "why", why)
	for _, s := range r.stages {
		s.endRunningOf(c)
	}
	r.partWithClient(c)
}

// partingTurn is how many queued requests of a leaving client are canceled in a turn.
const partingTurn = 256

// partWithClient is one turn of a leaving client. It returns the number of canceled requests.
func (r *Ring) partWithClient(c *ClientSession) (n int) {
	isOut := true
	for _, s := range r.stages {
		k, out := s.cancelQueuedOf(c, partingTurn-n)
		n += k
		isOut = isOut && out
	}
	if !isOut {
		r.enqueueClient(c)
		return n
	}
	c.moveTo(clientLeft)
	r.returnWindowIfDone(c)
	return n
}

func (r *Ring) returnWindowIfDone(c *ClientSession) {
	if c.state != clientLeft || c.busy > 0 {
		return
	}
	c.moveTo(clientReturned)
	if !r.stages[0].settings.Private {
		r.returnWindow(c)
		return
	}
	r.clearing.Go(func() {
		r.clearSlots(c.first, c.window)
		r.loop.Post(func() { r.returnWindow(c) })
	})
}

func (r *Ring) returnWindow(c *ClientSession) {
	r.takeBackWindow(c)
	r.dropUnusedDevice()
	r.log.Debug("window returned", "client", c.Label(), "pid", c.Pid, "window", c.window)
	r.sessionEnded()
}

// clearSlots overwrites a client's inputs and outputs, and the board's texts about its
// requests. It runs away from the loop: no peer has the slots meanwhile.
func (r *Ring) clearSlots(first uint32, n int) {
	for i := range r.layout.Planes { // none in device memory: CheckPrivate
		clear(r.layout.Planes[i].Rows(r.planes.Bytes(), first, n))
	}
	for s := first; s < first+uint32(n); s++ {
		r.board.Clear(s)
	}
}

func (r *Ring) takeBackWindow(c *ClientSession) {
	if int32(c.latest-r.base) > 0 {
		r.base = c.latest
	}
	r.windows.returnSlots(c.first, c.window)
	if r.leased[c.UID] -= c.window; r.leased[c.UID] == 0 {
		delete(r.leased, c.UID)
	}
}
