package shm

import (
	"sync/atomic"
	"unsafe"
)

// Express lets code outside Go send a client's requests, one at a time,
// without entering Go: the client lends it a slot of its window. In a process
// whose own work is not Go's, every wait in Go would wake the Go runtime's
// threads too.
//
// It lies in memory that C owns and never frees. In C: struct rb_express,
// which mirrors it field by field.
type Express struct {
	Owner  atomic.Uint64 // the C handle of the client; 0 if none
	Inside atomic.Uint32 // 1 while a thread has it, in Go or in C; what it guards is below
	Wanted atomic.Uint32 // 1: whoever leaves it calls the client, which needs the slot itself
	Dead   atomic.Uint32 // 1: nobody will answer any more

	// The producer's side of the commit ring, which Go and C share.
	RingLock atomic.Uint32
	RingTail uint64

	// Guarded by Inside.
	Lent      atomic.Uint32
	Slot      uint32
	Gen       uint32 // of the slot's last commit
	Inputs    uint32
	Outputs   uint32
	RingMask  uint32
	Doorbell  Doorbell
	Committed int64          // when, of the last commit
	usual     int64          // how long a request takes, nanoseconds; C's
	Word      unsafe.Pointer // *Word of the slot
	Bell      unsafe.Pointer // *uint32 of the window
	RingWords unsafe.Pointer
	Entries   unsafe.Pointer
	In, Out   [ExpressTensors]ExpressRow
}

// ExpressRow is a row of one tensor.
type ExpressRow struct {
	At    unsafe.Pointer
	Bytes uint64
}

// ExpressTensors is the most inputs, and outputs, of a model that can go that
// way.
const ExpressTensors = 8

// TryEnter takes it, if nobody has it.
func (x *Express) TryEnter() bool { return x.Inside.Swap(1) == 0 }

// Leave gives it up.
func (x *Express) Leave() { x.Inside.Store(0) }

// Reset makes it ready for a new attachment, which begins a new ring.
func (x *Express) Reset() {
	x.Dead.Store(0)
	x.RingTail = 0
}

// Lend fills in where everything of a slot lies.
func (x *Express) Lend(l *Layout, planes *Segment, b *Board, ring Ring[Commit], slot, bellAt, gen uint32) {
	x.Slot, x.Gen, x.usual = slot, gen, 0
	x.Word, x.Bell = unsafe.Pointer(&b.words[slot]), unsafe.Pointer(&b.bells[bellAt].Count)
	x.RingWords, x.Entries, x.RingMask = unsafe.Pointer(ring.words), unsafe.Pointer(&ring.entries[0]), uint32(len(ring.entries)-1)
	rows := func(planesOf []Plane, to []ExpressRow) uint32 {
		for k := range planesOf {
			row := planesOf[k].Rows(planes.Bytes(), slot, 1)
			to[k] = ExpressRow{unsafe.Pointer(&row[0]), uint64(len(row))}
		}
		return uint32(len(planesOf))
	}
	x.Inputs, x.Outputs = rows(l.Inputs, x.In[:]), rows(l.Outputs, x.Out[:])
	x.Lent.Store(1)
}

// Unshare makes the ring Go's alone again, at the end of its life.
func (p *Producer[T]) Unshare(x *Express) { p.tail = x.RingTail }

// PushShared is Push on a ring that C pushes to as well.
func (p *Producer[T]) PushShared(x *Express, e *T) (ring, full bool) {
	for !x.RingLock.CompareAndSwap(0, 1) { // held for the time of a push
		yield()
	}
	p.tail = x.RingTail
	ring, full = p.Push(e)
	x.RingTail = p.tail
	x.RingLock.Store(0)
	return ring, full
}
