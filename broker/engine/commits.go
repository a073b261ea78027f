// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"fmt"
	"slices"

	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
)

// Clients' turns: the loop reads their commits and cancels.

// clientTurn is how many rows the loop reads of a client before the ring's next client.
// An entry that is no request counts as a row.
const clientTurn = 32

func (r *Ring) clientRang(c *ClientSession) {
	if c.isAttached() {
		r.enqueueClient(c)
	}
}

func (r *Ring) enqueueClient(c *ClientSession) {
	if !c.unread {
		c.unread = true
		r.unread = append(r.unread, c)
	}
	r.loop.enqueueRing(r)
}

// visitClients gives the ring's clients turns for that many rows, and returns the used rows.
func (r *Ring) visitClients(rows int) (used int) {
	for used < rows && len(r.unread) > 0 {
		c := r.unread[0]
		r.unread = slices.Delete(r.unread, 0, 1) // the list is short
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

// readCommits is one turn of a client. It returns how many rows it has read.
func (r *Ring) readCommits(c *ClientSession, rows int) (used int) {
	// Finished batches come first. Otherwise the client's next request would seem to be
	// its second in flight, and its batch would wait for it.
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

func (r *Ring) disconnectClient(c *ClientSession, err error) {
	r.log.Warn("client disconnected: it broke the protocol", "client", c.Label(), "pid", c.Pid, "reason", err)
	r.stages[0].stats.offenders++
	r.loop.outside.Offended(c.Process)
	r.clientLeft(c, err.Error())
}

// readCommit takes one entry of a client into the books, which are up to date.
func (r *Ring) readCommit(c *ClientSession, e *shm.Commit) error {
	switch e.Kind {
	case shm.KindCommit, shm.KindStream:
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

func (r *Ring) enterRequest(c *ClientSession, e *shm.Commit) {
	info := r.slot(e.Slot)
	for _, s := range r.stages {
		if s.recorder != nil {
			s.recorder.readPreviousTimes(c, e)
		}
	}
	info.gen, info.commit, info.client, info.stage = e.Gen, *e, c, r.stages[0]
	info.commit.Rows = r.rowsOf(e)
	if int32(e.Gen-c.latest) > 0 {
		c.latest = e.Gen
	}
	if info.unserved { // the text is about the previous request
		info.unserved = false
		r.board.SetReason(e.Slot, "")
	}
	if e.Kind == shm.KindStream {
		r.board.SetStreams(e.Slot, e.Gen)
	}
	r.setSlots(e.Slot, queued)
	c.busy++
	c.last = e.Slot
	if r.whole != nil {
		r.whole.requests++
	}
	r.countBegun(e)
	code := info.stage.admitRequest(info, e.Rows)
	if code != status.OK {
		end := ending{code: code}
		if code == status.ErrNoWorker && info.stage.staffing.Failed {
			end.reason = info.stage.whyNoWorker()
		}
		r.settle(e.Slot, ended, end)
	}
}

// countBegun counts the rows whose sequence begins.
func (r *Ring) countBegun(e *shm.Commit) {
	if r.layout.Step == nil {
		return
	}
	for slot := e.Slot; slot < e.Slot+r.rowsOf(e); slot++ {
		if r.layout.ReadStep(r.planes.Bytes(), slot)&shm.StepFresh != 0 {
			r.stages[0].stats.begun++
		}
	}
}

// cancelRequest ends a request for its client. A cancel after the end does nothing. A
// cancel of a slot or generation that never was is a violation.
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
		r.settle(e.Slot, ended, ending{code: status.ErrCanceled})
	case running:
		r.settle(e.Slot, endedEarly, ending{code: status.ErrCanceled})
	}
	return nil
}
