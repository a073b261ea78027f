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
	first   uint32 // its window
	window  int
	commits shm.Consumer[shm.Commit]
	times   shm.ClientTimes // read by the recorder
	last    uint32          // where its last request began
	busy    int             // requests queued, running or held
	state   clientState     // changed by moveTo only
	unread  bool            // on its ring's list of those whose turn comes
	latest  uint32          // the latest generation that it used
}

// owns says whether a commit's slots are all inside the client's window.
func (c *ClientSession) owns(e *shm.Commit) bool {
	return e.Rows >= 1 && e.Slot >= c.first && uint64(e.Slot)+uint64(e.Rows) <= uint64(c.first)+uint64(c.window)
}

// OpenClient makes the session of a client, before it is attached: not on the
// loop, since what it costs grows with the window.
func (r *Ring) OpenClient(p *Peer, window int, times bool) error {
	if window < 0 || window > r.layout.Slots {
		return fmt.Errorf("%w: window of %d slots, the ring has %d; ask for fewer, or raise the model's slots",
			status.ErrRingFull, window, r.layout.Slots)
	}
	if window == 0 { // chosen later, and as small a session does for every window up to this
		window = DefaultWindow
	}
	return p.openSession(r, shm.KindClient, shm.ClientSegmentSize(window, times))
}

// Attaching takes three steps, so that none on the loop grows with the window:
//
//	reserveWindow  on the loop: the window is this client's, and nobody looks at it
//	resetWindow    away from it
//	attachClient   on the loop
//
// newBooks is made before, for a window of that size: it is not known which
// chunks are missing, but how many can be.
func newBooks(window int) (chunks [][]slotInfo) {
	for n := chunkSlots; n < window+chunkSlots && window > chunkSlots; n += chunkSlots {
		chunks = append(chunks, make([]slotInfo, chunkSlots))
	}
	return chunks
}

// reserveWindow leases a window to a client whose session is open. On an error
// the session is still the caller's.
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
	c := &ClientSession{Peer: p, ring: r, first: first, window: window, last: first, latest: r.base}
	c.commits = shm.NewConsumer(shm.CommitRing(p.seg, window))
	return c, nil
}

// resetWindow makes the slots new. All of them start from one generation, later
// than any that a former owner used.
func (c *ClientSession) resetWindow() {
	for s := c.first; s < c.first+uint32(c.window); s++ {
		*c.ring.slot(s) = slotInfo{gen: c.latest}
		c.ring.board.Reset(s, c.latest)
	}
}

// attachClient takes a client with a window among those that may commit.
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

// A client that leaves its window open gets DefaultWindow slots, but not more
// than a share of those that are free: in a ring of few large slots the first
// clients leave something for the later ones.
const (
	DefaultWindow = 8
	windowShare   = 8
)

// leaseWindow finds consecutive free slots for a user: as many as were asked
// for, or, for 0, as many as fit.
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

// firstGen is the generation before the client's first.
func (c *ClientSession) firstGen() uint32 { return c.ring.slot(c.first).gen }

// clientTurn is how many rows a client is read for before the next one of its
// ring is; an entry that is no request counts as a row.
const clientTurn = 32

// clientRang puts a client in line for its turn.
func (r *Ring) clientRang(c *ClientSession) {
	if c.isAttached() {
		r.enqueueClient(c)
	}
}

// enqueueClient puts a client in line, and its ring.
func (r *Ring) enqueueClient(c *ClientSession) {
	if !c.unread {
		c.unread = true
		r.unread = append(r.unread, c)
	}
	r.loop.enqueueRing(r)
}

// visitClients gives the ring's clients turns, for rows in all, and returns for how many.
func (r *Ring) visitClients(rows int) (used int) {
	for used < rows && len(r.unread) > 0 {
		c := r.unread[0]
		r.unread = slices.Delete(r.unread, 0, 1) // few, and it keeps the memory
		c.unread = false
		used++
		switch c.state {
		case clientAttached:
			used += r.readCommits(c, clientTurn)
		case clientLeaving:
			used += r.partWithClient(c)
		}
	}
	return used
}

// readCommits is one turn of a client. It returns how many rows were read; if
// there are more, the client is in line again.
func (r *Ring) readCommits(c *ClientSession, rows int) (used int) {
	// What workers have finished is read first: otherwise a client that sends
	// its next request with the answer would seem to have one more in flight,
	// and from then on could join, and wait for itself.
	r.catchUpForClient()
	for used < rows {
		n, err := c.commits.Pending()
		entries := r.loop.entries[:0]
		for ; n > 0 && used < rows && err == nil; n-- {
			entries = entries[:len(entries)+1]
			e := &entries[len(entries)-1]
			c.commits.Take(e)
			used += int(max(1, r.rowsOf(e)))
		}
		r.catchUpWithCommits(c, entries)
		for i := 0; i < len(entries) && err == nil; i++ {
			err = r.readCommit(c, &entries[i])
		}
		if err != nil {
			r.loop.collectOutcome(outcome{kind: brokeRules, client: c, err: err})
			return used
		}
		c.commits.Give()
		if n == 0 && c.commits.Arm() {
			return used
		}
	}
	r.enqueueClient(c)
	return used
}

// disconnectClient throws out a client that broke the protocol.
func (r *Ring) disconnectClient(c *ClientSession, err error) {
	r.log.Warn("client disconnected: it broke the protocol", "client", c.Label(), "pid", c.Pid, "reason", err)
	r.stages[0].stats.offenders++
	r.loop.outside.Offended(c.Process)
	r.clientLeft(c, err.Error())
}

// readCommit takes one entry of a client into the books, which have caught up with it.
func (r *Ring) readCommit(c *ClientSession, e *shm.Commit) error {
	switch e.Kind {
	case shm.KindCommit:
		if err := r.checkCommit(c, e); err != nil {
			return err
		}
		r.enterRequest(c, e)
		return nil
	case shm.KindCancel:
		return r.cancelRequest(c, e)
	}
	return fmt.Errorf("%w: entry of kind %d", status.ErrProtocol, e.Kind)
}

// enterRequest takes a checked commit into the books and gives it to the stage.
func (r *Ring) enterRequest(c *ClientSession, e *shm.Commit) {
	info := r.slot(e.Slot)
	for _, s := range r.stages {
		if s.recorder != nil {
			s.recorder.readBefore(c, e)
		}
	}
	info.gen, info.commit, info.client, info.stage = e.Gen, *e, c, r.stages[0]
	info.commit.Rows = r.rowsOf(e)
	if int32(e.Gen-c.latest) > 0 {
		c.latest = e.Gen
	}
	if info.unserved { // the text is of the request before
		info.unserved = false
		r.board.SetReason(e.Slot, "")
	}
	r.setSlots(e.Slot, queued)
	c.busy++
	c.last = e.Slot
	if r.whole != nil {
		r.whole.requests++
	}
	code := info.stage.admitRequest(info, e.Rows)
	if code != status.OK {
		r.endRequest(e.Slot, code, "", false)
		r.freeRequest(e.Slot)
	}
}

// cancelRequest ends a request that its client no longer wants. A cancel that comes
// after the end is nothing; one for a slot or generation that never was is a
// violation.
func (r *Ring) cancelRequest(c *ClientSession, e *shm.Commit) error {
	if e.Slot < c.first || e.Slot >= c.first+uint32(c.window) || int32(e.Gen-r.slot(e.Slot).gen) > 0 {
		return fmt.Errorf("%w: cancel of slot %d generation %d", status.ErrProtocol, e.Slot, e.Gen)
	}
	info := r.slot(e.Slot)
	if info.gen != e.Gen || info.state == idle || info.head != e.Slot {
		return nil
	}
	info.stage.touch()
	switch info.state {
	case queued:
		info.stage.withdrawRequest(e.Slot)
		r.endRequest(e.Slot, status.ErrCanceled, "", false)
		r.freeRequest(e.Slot)
	case running:
		r.endRunningRequest(e.Slot, status.ErrCanceled)
	}
	return nil
}

// clientLeft cleans up after a client that closed, died, or was thrown out.
// What it had queued is canceled, in turns if that is much; what runs keeps its
// slots until the worker is done; then the window returns.
//
// In docs/model: ClientLeft.
func (r *Ring) clientLeft(c *ClientSession, why string) {
	if !c.isAttached() {
		return
	}
	for _, s := range r.stages {
		s.touch()
		s.catchUp() // what workers answered before it left counts
	}
	c.moveTo(clientLeaving)
	_, _ = c.commits.Pending() // SYNC POINT "leave": its window is another's soon
	for _, s := range r.stages {
		s.recorder.readLast(c)
	}
	delete(r.clients, c)
	c.closeSession(r.loop)
	r.log.Debug("client left", "client", c.Label(), "pid", c.Pid, "why", why)
	for _, s := range r.stages {
		s.endRunningOf(c)
	}
	r.partWithClient(c)
}

// partingTurn is how much of what a departed client had queued is canceled in
// one go.
const partingTurn = 256

// partWithClient is one turn of a client that has left. It returns how many requests
// were canceled.
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

// returnWindowIfDone frees the window of a client that has left and has nothing under
// way any more.
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
	r.vacated()
}

// clearSlots overwrites what a client's slots held: inputs, outputs, and what the
// board says about its requests. Nobody uses them meanwhile, so it is not done
// on the loop.
func (r *Ring) clearSlots(first uint32, n int) {
	for i := range r.layout.Planes { // none in device memory: checkPrivate
		clear(r.layout.Planes[i].Rows(r.planes.Bytes(), first, n))
	}
	for s := first; s < first+uint32(n); s++ {
		r.board.Clear(s)
	}
}

// takeBackWindow frees a client's window.
func (r *Ring) takeBackWindow(c *ClientSession) {
	if int32(c.latest-r.base) > 0 {
		r.base = c.latest
	}
	r.windows.returnSlots(c.first, c.window)
	if r.leased[c.UID] -= c.window; r.leased[c.UID] == 0 {
		delete(r.leased, c.UID)
	}
}
