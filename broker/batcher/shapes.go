// SPDX-License-Identifier: Apache-2.0

package batcher

import (
	"math/bits"
	"math/rand/v2"
)

// shape is the queue of one shape: everything that may share a batch.
//
// Its requests sit in one list per base level (Batcher.lists). Requests that
// PreserveOrder holds back, and retries, belong to the shape but are in no
// list and not counted in rows, cost, due and large.
type shape struct {
	dims     Dims
	hash     uint32
	requests int32  // waiting requests of this shape, held ones and retries too; 0: free
	rows     int32  // of the requests in its lists
	cost     int    // of these rows
	due      int32  // requests in its lists whose ready time has passed
	large    int32  // requests in its lists with more than one row
	levels   uint64 // bit i: list i is not empty

	// How the shape is filed (see filing.go). full and ready say in which
	// classes it is filed now.
	full, ready bool
	preferred   int32 // rows of the largest preferred size that its queue reaches, or 0
	stale       bool  // preferred must be computed again; the shape is on Batcher.stale
}

// shapeTable finds the shape of given dims. Shapes are numbered; number 0 is
// that of the zero Dims, is never freed and needs no lookup, because most
// models have no variable dimension. The others are recycled as soon as
// nothing waits in them, so that their number is bounded by the number of
// waiting requests, whatever a hostile client sends.
//
// The table is open addressing with linear probing and backward-shift
// deletion: unlike a Go map it never allocates while shapes come and go.
type shapeTable struct {
	shapes []shape
	free   []int32
	slots  []shapeSlot
	used   int
	secret uint64 // keeps a client from choosing dims that collide
}

// shapeSlot has the hash beside the number, so that probing seldom has to look
// at a shape that is not the one.
type shapeSlot struct {
	hash  uint32
	entry int32 // 1 + shape number, or 0
}

func newShapeTable() shapeTable {
	return shapeTable{
		shapes: make([]shape, 1, 16),
		slots:  make([]shapeSlot, 16),
		secret: rand.Uint64() | 1,
	}
}

// find returns the number of the shape with these dims, a new one if needed.
func (t *shapeTable) find(dims *Dims) int32 {
	if *dims == (Dims{}) {
		return 0
	}
	mask := uint32(len(t.slots) - 1)
	hash := t.hash(dims)
	i := hash & mask
	for ; t.slots[i].entry != 0; i = (i + 1) & mask {
		if x := t.slots[i]; x.hash == hash && t.shapes[x.entry-1].dims == *dims {
			return x.entry - 1
		}
	}
	s := t.allocate(dims)
	t.shapes[s].hash = hash
	t.slots[i] = shapeSlot{hash, s + 1}
	t.used++
	if 2*t.used > len(t.slots) {
		t.rehash()
	}
	return s
}

func (t *shapeTable) allocate(dims *Dims) int32 {
	if n := len(t.free); n > 0 {
		s := t.free[n-1]
		t.free = t.free[:n-1]
		t.shapes[s].dims = *dims
		return s
	}
	t.shapes = append(t.shapes, shape{dims: *dims})
	return int32(len(t.shapes) - 1)
}

// recycle frees shape s, in which nothing waits any more.
func (t *shapeTable) recycle(s int32) {
	if s == 0 {
		return
	}
	mask := uint32(len(t.slots) - 1)
	hole := t.shapes[s].hash & mask
	for t.slots[hole].entry != s+1 {
		hole = (hole + 1) & mask
	}
	// Close the hole with entries that probed past it.
	for i := (hole + 1) & mask; t.slots[i].entry != 0; i = (i + 1) & mask {
		home := t.slots[i].hash & mask
		if (i-home)&mask >= (i-hole)&mask {
			t.slots[hole] = t.slots[i]
			hole = i
		}
	}
	t.slots[hole] = shapeSlot{}
	t.used--
	t.free = append(t.free, s)
}

func (t *shapeTable) rehash() {
	old := t.slots
	t.slots = make([]shapeSlot, 2*len(old))
	mask := uint32(len(t.slots) - 1)
	for _, x := range old {
		if x.entry == 0 {
			continue
		}
		i := x.hash & mask
		for t.slots[i].entry != 0 {
			i = (i + 1) & mask
		}
		t.slots[i] = x
	}
}

func (t *shapeTable) hash(d *Dims) uint32 {
	h := t.secret
	for i := 0; i < len(d); i += 2 {
		hi, lo := bits.Mul64(h^uint64(d[i])^uint64(d[i+1])<<32, 0x9e3779b97f4a7c15)
		h = hi ^ lo ^ t.secret
	}
	return uint32(h ^ h>>32)
}
