package broker

import (
	"fmt"

	"github.com/ringbatch/ringbatch/broker/batcher"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
)

// slotState is the broker's private truth about a slot. What peers write into
// shared memory are wishes; this says whether they are legal.
//
//	        commit           dispatch           done
//	idle ────────────► queued ──────► running ──────► idle
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

// slotInfo is kept for every slot; the request's books are at its first slot.
type slotInfo struct {
	state slotState
	head  uint32 // first slot of the request that this slot is part of; not for idle
	gen   uint32 // generation of the last accepted commit that began here

	// Of a request that begins here:
	commit     shm.Commit
	client     *clientSession
	worker     *workerSession // running, held
	batch      uint64         // running, held
	dispatched int64
	attempts   int // workers it was given to that died of it
}

// accept checks a commit against the books. A violation of the protocol is an
// error and costs the client its connection.
func (m *model) accept(c *clientSession, e *shm.Commit) error {
	bad := func(format string, a ...any) error {
		return fmt.Errorf("%w: commit of slot %d: %s", status.ErrProtocol, e.Slot, fmt.Sprintf(format, a...))
	}
	end := uint64(e.Slot) + uint64(e.Rows)
	if e.Rows < 1 || e.Slot < c.first || end > uint64(c.first)+uint64(c.window) {
		return bad("%d rows are outside the window %d+%d", e.Rows, c.first, c.window)
	}
	for s := e.Slot; s < uint32(end); s++ {
		if m.slots[s].state != idle && !m.endedEarly(s) {
			return bad("slot %d is %s", s, m.slots[s].state)
		}
	}
	if want := m.slots[e.Slot].gen + 1; e.Gen != want {
		return bad("generation %d, expected %d", e.Gen, want)
	}
	n := 0
	for _, t := range m.layout.Signature.Inputs {
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

// endedEarly handles a slot that its client uses again, or whose answer it
// has, before the worker's "done" was read: the worker answers the client
// first. The board says whether that happened. (A held slot can be such a one
// too: then the worker was quicker than whatever wanted to end it.)
//
// In docs/model: endedEarly in ReadCommit.
func (m *model) endedEarly(s uint32) bool {
	head := m.slots[s].head
	info := &m.slots[head]
	if info.state != running && info.state != held {
		return false
	}
	if m.drainDone(info.worker); m.slots[s].state == idle {
		return true
	}
	w := m.board.Word(head)
	if w.Generation() != info.gen || w.Held() {
		return false
	}
	if info.state == running { // the end of a held one was counted
		m.stats.ended(w.Status())
	}
	m.batcher.Ended(batcher.RequestID(head))
	m.free(head)
	return true
}

// free returns a request's slots to their client (or to nobody, if it left).
func (m *model) free(head uint32) {
	info := &m.slots[head]
	c := info.client
	if info.state == held {
		m.held--
	}
	for s := head; s < head+info.commit.Rows; s++ {
		m.slots[s].state = idle
	}
	info.worker, info.client, info.attempts = nil, nil, 0
	if c.busy--; c.left && c.busy == 0 {
		m.returnWindow(c)
	}
}

// setState marks all slots of a request.
func (m *model) setState(head uint32, st slotState) {
	for s := head; s < head+m.slots[head].commit.Rows; s++ {
		m.slots[s].state = st
		m.slots[s].head = head
	}
}

// windows leases ranges of consecutive slots, lowest first.
type windows struct{ used []bool }

func (w *windows) lease(n int) (uint32, bool) {
	run := 0
	for i, used := range w.used {
		if used {
			run = 0
			continue
		}
		if run++; run == n {
			first := i - n + 1
			for j := first; j <= i; j++ {
				w.used[j] = true
			}
			return uint32(first), true
		}
	}
	return 0, false
}

func (w *windows) giveBack(first uint32, n int) {
	for i := range n {
		w.used[int(first)+i] = false
	}
}

// free counts the slots that no client has.
func (w *windows) free() int {
	n := 0
	for _, used := range w.used {
		if !used {
			n++
		}
	}
	return n
}
