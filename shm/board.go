// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"fmt"
	"sync/atomic"

	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

// A slot's life. The broker's private records are authoritative; the messages in shared
// memory move the slot from state to state.
//
//	        claim            commit           dispatch         complete | fail
//	 free ─────────► claimed ───────► queued ──────────► running ─────────────► done
//	  ▲                 │ abort          │ cancel, expire    │ expire, cancel      │
//	  │                 ▼                ▼                   ▼ (held)              │
//	  ◄─────────────────┴── release ─────┴── reclaim ────────┴────── release ──────┘
//
//	move       by                  message to the others
//	claim      client, privately   –
//	commit     client              Commit entry in its session ring
//	dispatch   broker              Mail in the worker's session
//	complete   worker              the slot's Word on the board, then the client's Bell
//	fail       worker or broker    the same
//	expire     broker              the same, with Held while a worker may still write
//	reclaim    broker              the same Word without Held, when that worker is done
//	release    client, privately   –

// Word says how the request in a slot ended: its generation, its status, and whether a
// worker still holds the slot. Exactly one end counts for each generation: the first
// that moves the word to it.
//
//	63          32 31        9   8    7      0
//	+-------------+-----------+------+--------+
//	| generation  |     0     | held | status |
//	+-------------+-----------+------+--------+
type Word uint64

const heldBit Word = 1 << 8

// MakeWord packs a word.
func MakeWord(gen uint32, s status.Code, held bool) Word {
	w := Word(gen)<<32 | Word(s)
	if held {
		w |= heldBit
	}
	return w
}

func (w Word) Generation() uint32  { return uint32(w >> 32) }
func (w Word) Status() status.Code { return status.Code(w) }
func (w Word) Held() bool          { return w&heldBit != 0 }

// Bell is the futex that a waiting client parks on. Each window has one, at its first
// slot. Workers and the broker add one and wake; the client only reads. One word has
// one waiter, so that no other waiter takes its wake-up.
//
// The other fields are of the slot itself, whose request's client takes parts: see parts.go.
type Bell struct {
	Count   atomic.Uint32
	streams atomic.Uint32 // by the broker
	shown   atomic.Uint64 // by the worker, as plane
	plane   atomic.Uint32 // page at which the growing output's plane begins
	_       [44]byte
}

// Record is written by the worker before the word. Its times and reason are about the
// request that begins in this slot. Dims are the actual sizes of the outputs' variable
// dimensions in this slot's row.
type Record struct {
	Dispatched int64
	Started    int64
	Finished   int64
	ReasonLen  uint32
	Version    uint32 // of the weights, from 1; 0: none
	Dims       [tensor.MaxVariableDims]uint32
}

// Board is the typed view of a board segment.
type Board struct {
	bells   []Bell
	words   []atomic.Uint64
	records []Record
	reasons []byte
	fence   atomic.Uint32 // see AfterCopy
}

// NewBoard views a segment whose header was checked.
func NewBoard(l *Layout, s *Segment) *Board {
	return &Board{
		bells:   array[Bell](s.mem, l.bellsAt, l.Slots),
		words:   array[atomic.Uint64](s.mem, l.wordsAt, l.Slots),
		records: array[Record](s.mem, l.recordsAt, l.Slots),
		reasons: s.mem[l.reasonsAt : l.reasonsAt+int64(l.Slots)*reasonBytes],
	}
}

// Word reads how the request in slot ended.
//
// SYNC POINT "completion", acquire side: if Word returns a generation, the outputs,
// record and reason that were written before its End are visible.
func (b *Board) Word(slot uint32) Word { return Word(b.words[slot].Load()) }

// End ends a generation of the slot. It returns false if that generation, or a later
// one, has ended already.
//
// SYNC POINT "completion", release side.
//
// In test/model: End.
func (b *Board) End(slot, gen uint32, s status.Code, held bool) bool {
	w := &b.words[slot]
	for {
		old := Word(w.Load())
		if int32(gen-old.Generation()) <= 0 {
			return false
		}
		if w.CompareAndSwap(uint64(old), uint64(MakeWord(gen, s, held))) {
			return true
		}
	}
}

// Reclaim clears the held bit that End has set: the worker is done with the slot, and
// the client may use it again.
//
// In test/model: Reclaim.
func (b *Board) Reclaim(slot, gen uint32) {
	old := Word(b.words[slot].Load())
	if old.Generation() == gen && old.Held() {
		b.words[slot].CompareAndSwap(uint64(old), uint64(old&^heldBit))
	}
}

// Repair is End for a word with a generation that never was, which only a broken worker
// can have written. The broker's records are authoritative.
func (b *Board) Repair(slot, gen uint32, s status.Code, held bool) {
	b.words[slot].Store(uint64(MakeWord(gen, s, held)))
}

// Reset sets the word of a slot of a new window to its first generation. Only the broker
// calls it, while no client owns the window.
func (b *Board) Reset(slot, gen uint32) {
	b.records[slot].ReasonLen = 0
	b.words[slot].Store(uint64(MakeWord(gen, status.OK, false)))
}

// Clear erases the record and the reason of a slot that no peer uses.
func (b *Board) Clear(slot uint32) {
	b.records[slot] = Record{}
	clear(b.reasons[int64(slot)*reasonBytes : int64(slot+1)*reasonBytes])
}

// ReasonNoWorker begins the broker's reason for a request that ended in the queue while the
// model had no worker. If a worker holds the slot of an expired request, the reason is
// undefined: the worker may be writing it.
const ReasonNoWorker = "no worker attached"

// Record is the slot's record. The worker owns it until End, the client afterwards.
func (b *Board) Record(slot uint32) *Record { return &b.records[slot] }

// SetReason writes the text of a failure. Call it before End.
func (b *Board) SetReason(slot uint32, text string) {
	area := b.reasons[int64(slot)*reasonBytes : int64(slot+1)*reasonBytes]
	b.records[slot].ReasonLen = uint32(copy(area, text))
}

// Reason reads the text of a failure that Word has shown.
func (b *Board) Reason(slot uint32) string {
	n := min(b.records[slot].ReasonLen, reasonBytes)
	area := b.reasons[int64(slot)*reasonBytes : int64(slot+1)*reasonBytes]
	return string(area[:n])
}

// Ring wakes the client whose window begins at slot.
func (b *Board) Ring(slot uint32) { b.bells[slot].Ring() }

// Bell is the bell of the window that begins at slot.
func (b *Board) Bell(slot uint32) *Bell { return &b.bells[slot] }

func (w Word) String() string {
	held := ""
	if w.Held() {
		held = " held"
	}
	return fmt.Sprintf("generation %d %s%s", w.Generation(), w.Status().Name(), held)
}
