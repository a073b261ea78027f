// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"fmt"

	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
)

// slotState is the broker's private truth about a slot. Peers write wishes into shared
// memory; the state decides whether they are legal.
//
//	        commit           dispatch           done
//	idle ────────────► queued ──────► running ──────► idle, or queued: at the next stage, or to run again
//	 ▲                   │               │ expire, cancel, client left
//	 └── cancel, expire ─┘               ▼
//	                                   held ── done, or the worker's death ──► idle
//
// An idle slot belongs to its client, or is not leased. A queued slot belongs to the
// batcher, a running one to a worker. A held request has ended, but a worker may still
// write into its slots.
type slotState uint8

const (
	idle slotState = iota
	queued
	running
	held
)

func (s slotState) String() string { return [...]string{"idle", "queued", "running", "held"}[s] }

// slotInfo is the books of a slot. Those of a request are at its first slot. The loop
// reads and writes them for every request, so they fit two lines of the cache.
type slotInfo struct {
	state    slotState
	troubled bool   // the request is run again; see Ring.troubles
	unserved bool   // the broker wrote the board's reason, for the previous request
	head     uint32 // first slot of this slot's request; not for idle
	gen      uint32 // generation of the last accepted commit that began here
	traced   int32  // the previous request's place in the recording; see recorder.readPreviousTimes

	// Of a request that begins here:
	commit     shm.Commit
	client     *ClientSession
	stage      *Stage         // that has it; not for idle
	worker     *WorkerSession // running, held
	batch      uint64         // running, held
	arrived    int64          // at the stage
	dispatched int64
}

// isWithWorker says that a worker may write into the slot.
func (x *slotInfo) isWithWorker() bool { return x.state == running || x.state == held }

// chunkSlots is how many slots' books are made at once, when one of them is leased.
const chunkSlots = 1 << 8

// slot is the books of a slot that is or was leased.
func (r *Ring) slot(i uint32) *slotInfo { return &r.books[i/chunkSlots][i%chunkSlots] }

// checkCommit checks a commit against the books, and changes nothing. An error is a
// violation of the protocol and costs the client its connection. The caller has
// brought the books up to date (catchup.go).
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
	if err := r.layout.Ties.CheckSizes(r.layout.Signature.Inputs, e.Dims[:n]); err != nil {
		return bad("%v", err)
	}
	for ; n < len(e.Dims); n++ {
		if e.Dims[n] != 0 {
			return bad("dimension %d is not variable", n)
		}
	}
	return nil
}

// rowsOf is how many slots of a request the books track. A request that is larger than
// any batch ends at once, so its first slot is enough.
func (r *Ring) rowsOf(e *shm.Commit) uint32 {
	if e.Rows > uint32(r.layout.MaxBatch) {
		return 1
	}
	return e.Rows
}

func (r *Ring) setSlots(head uint32, st slotState) {
	n := r.slot(head).commit.Rows
	r.rows[r.slot(head).state] -= int(n)
	r.rows[st] += int(n)
	for s := head; s < head+n; s++ {
		r.slot(s).state = st
		r.slot(s).head = head
	}
}
