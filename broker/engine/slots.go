// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"fmt"

	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
)

// slotState is the broker's private truth about a slot. What peers write into
// shared memory are wishes; this says whether they are legal.
//
//	        commit           dispatch           done
//	idle ────────────► queued ──────► running ──────► idle, or queued: at the next stage, or to run again
//	 ▲                   │               │ expire, cancel, client left
//	 └── cancel, expire ─┘               ▼
//	                                   held ── done, or the worker's death ──► idle
//
// idle: the client's to claim, or nobody's. queued: the batcher's. running: a
// worker's. held: ended already, but a worker may still write into it.
type slotState uint8

const (
	idle slotState = iota
	queued
	running
	held
)

func (s slotState) String() string { return [...]string{"idle", "queued", "running", "held"}[s] }

// slotInfo is kept for every slot; the request's books are at its first slot. It
// is what a loop reads and writes most of a request, so it is packed: two lines of
// the cache.
type slotInfo struct {
	state    slotState
	troubled bool   // its request is run again; see ring.troubles
	unserved bool   // the reason on the board is ours, and of the request before
	head     uint32 // first slot of the request that this slot is part of; not for idle
	gen      uint32 // generation of the last accepted commit that began here
	traced   int32  // place in the recording of the request before; see recorder.readBefore

	// Of a request that begins here:
	commit     shm.Commit
	client     *ClientSession
	stage      *Stage         // which has it; not for idle
	worker     *WorkerSession // running, held
	batch      uint64         // running, held
	arrived    int64          // at its stage
	dispatched int64
}

// isWithWorker says that a worker may write into the slot.
func (x *slotInfo) isWithWorker() bool { return x.state == running || x.state == held }

// chunkSlots is how many slots' books are made at once. A ring may be declared
// with a million slots; its books cost what its clients have.
const chunkSlots = 1 << 8

// slot is the books of a slot that somebody has, or had.
func (r *Ring) slot(i uint32) *slotInfo { return &r.books[i/chunkSlots][i%chunkSlots] }

// checkCommit says whether a commit is legal by the books, and changes nothing. A
// violation of the protocol is an error and costs the client its connection.
// The books must have followed the board before: see catchup.go.
func (r *Ring) checkCommit(c *ClientSession, e *shm.Commit) error {
	bad := func(format string, a ...any) error {
		return fmt.Errorf("%w: commit of slot %d: %s", status.ErrProtocol, e.Slot, fmt.Sprintf(format, a...))
	}
	if !c.owns(e) {
		return bad("%d rows are outside the window %d+%d", e.Rows, c.first, c.window)
	}
	for s := e.Slot; s < e.Slot+r.rowsOf(e); s++ {
		if r.slot(s).state != idle {
			return bad("slot %d is %s", s, r.slot(s).state)
		}
	}
	if want := r.slot(e.Slot).gen + 1; e.Gen != want {
		return bad("generation %d, expected %d", e.Gen, want)
	}
	n := 0
	for _, t := range r.layout.Signature.Inputs {
		for _, v := range t.Variable {
			if d := e.Dims[n]; int64(d) > int64(t.Shape[v]) {
				return bad("variable dimension %d is %d, at most %d", n, d, t.Shape[v])
			}
			n++
		}
	}
	for ; n < len(e.Dims); n++ {
		if e.Dims[n] != 0 {
			return bad("dimension %d is not variable", n)
		}
	}
	return nil
}

// rowsOf is how many slots of a request the books have to care for: one that
// is larger than any batch ends at once, whatever the rest of it may be.
func (r *Ring) rowsOf(e *shm.Commit) uint32 {
	if e.Rows > uint32(r.layout.MaxBatch) {
		return 1
	}
	return e.Rows
}

// freeRequest returns a request's slots to their client (or to nobody, if it left).
func (r *Ring) freeRequest(head uint32) {
	info := r.slot(head)
	c := info.client
	if info.troubled {
		code := status.ErrCanceled // unless the board says more
		if w := r.board.Word(head); w.Generation() == info.gen {
			code = w.Status()
		}
		r.settleTrouble(head, code)
	}
	if info.state == held {
		r.held--
	}
	r.rows[info.state] -= int(info.commit.Rows)
	r.rows[idle] += int(info.commit.Rows)
	for s := head; s < head+info.commit.Rows; s++ {
		r.slot(s).state = idle
	}
	info.stage, info.worker, info.client = nil, nil, nil
	c.busy--
	if c.busy == 0 && c.state == clientLeft {
		r.loop.collectOutcome(outcome{kind: windowUnused, client: c})
	}
}

// setSlots marks all slots of a request.
func (r *Ring) setSlots(head uint32, st slotState) {
	n := r.slot(head).commit.Rows
	r.rows[r.slot(head).state] -= int(n)
	r.rows[st] += int(n)
	for s := head; s < head+n; s++ {
		r.slot(s).state = st
		r.slot(s).head = head
	}
}
