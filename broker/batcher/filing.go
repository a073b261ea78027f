// SPDX-License-Identifier: Apache-2.0

package batcher

import (
	"math/bits"

	"github.com/ringbatch/ringbatch/policy"
)

// Finding the shape that goes first (rule 5) must not look at every shape. So each shape is filed,
// once per level at which it has requests, in up to three classes. A class has a heap per
// level, ordered by the seq of the shape's first request there:
//
//	anything  it has requests          for an idle worker, when no other client could join
//	ready     full, preferred or due   for an idle worker
//	full      no more fits             for a busy worker with room
//
// Ageing needs no refiling: it lifts the oldest request of a level furthest, so it is enough to
// compare the tops of the heaps.
type class struct {
	heaps    []minHeap // by base level
	occupied uint64    // bit i: heaps[i] is not empty
}

func (c *class) set(level uint8, s int32, seq int64) {
	c.heaps[level].set(uint32(s), seq, 0)
	c.occupied |= 1 << level
}

func (c *class) remove(level uint8, s int32) {
	h := &c.heaps[level]
	h.remove(uint32(s))
	if h.empty() {
		c.occupied &^= 1 << level
	}
}

// refile brings the filing of shape s up to date after its counts changed.
// heads has a bit for each level whose list has another head now.
func (b *Batcher) refile(s int32, heads uint64) {
	sh := &b.shapes.shapes[s]
	full := int(sh.rows) >= b.settings.MaxBatchSize || b.settings.MaxBatchCost > 0 && sh.cost >= b.settings.MaxBatchCost
	ready := full || sh.due > 0 || sh.preferred > 0
	if full != sh.full || ready != sh.ready {
		sh.full, sh.ready = full, ready
		heads |= sh.levels
	}
	for ; heads != 0; heads &= heads - 1 {
		b.refileLevel(s, uint8(bits.TrailingZeros64(heads)))
	}
}

func (b *Batcher) refileLevel(s int32, level uint8) {
	sh := &b.shapes.shapes[s]
	head := b.list(s, level).head
	if head == none {
		b.anything.remove(level, s)
		b.ready.remove(level, s)
		b.full.remove(level, s)
		return
	}
	seq := b.requests[head].seq
	b.anything.set(level, s, seq)
	b.ready.file(sh.ready, level, s, seq)
	b.full.file(sh.full, level, s, seq)
}

func (c *class) file(in bool, level uint8, s int32, seq int64) {
	if in {
		c.set(level, s, seq)
	} else if c.occupied&(1<<level) != 0 {
		c.remove(level, s)
	}
}

// first is the shape of class c that goes first (rule 5); -1 if c is empty.
func (b *Batcher) first(c *class, now Time) int32 {
	if c.occupied == 0 {
		return -1
	}
	if b.settings.Ageing == 0 || c.occupied&(c.occupied-1) == 0 {
		return int32(c.heaps[bits.TrailingZeros64(c.occupied)].min().id)
	}
	best, bestRank, bestSeq := int32(-1), 0, int64(0)
	for levels := c.occupied; levels != 0; levels &= levels - 1 {
		level := uint8(bits.TrailingZeros64(levels))
		top := c.heaps[level].min()
		rank := b.rank(level, b.requests[b.list(int32(top.id), level).head].since, now)
		if best < 0 || rank < bestRank || (rank == bestRank && top.key < bestSeq) {
			best, bestRank, bestSeq = int32(top.id), rank, top.key
		}
	}
	return best
}

// rank is the level of a request now: its base level, lifted by one for each
// Ageing that it has waited. Ageing must be set.
func (b *Batcher) rank(base uint8, since, now Time) int {
	lifted := (now - since) / Time(b.settings.Ageing)
	return max(0, int(base)-int(min(lifted, policy.MaxLevels+1)))
}

// firstLevel is the list of shape s that holds the first request of its queue.
// The shape must have one.
func (b *Batcher) firstLevel(s int32, now Time) uint8 {
	return b.firstOf(b.shapes.shapes[s].levels, func(level uint8) RequestID { return b.list(s, level).head }, now)
}

// firstOf is the level, of some, whose request goes first.
func (b *Batcher) firstOf(levels uint64, request func(level uint8) RequestID, now Time) uint8 {
	first := uint8(bits.TrailingZeros64(levels))
	if b.settings.Ageing == 0 || levels&(levels-1) == 0 {
		return first
	}
	r := &b.requests[request(first)]
	rank, seq := b.rank(first, r.since, now), r.seq
	for levels &= levels - 1; levels != 0; levels &= levels - 1 {
		level := uint8(bits.TrailingZeros64(levels))
		r := &b.requests[request(level)]
		if k := b.rank(level, r.since, now); k < rank || (k == rank && r.seq < seq) {
			first, rank, seq = level, k, r.seq
		}
	}
	return first
}
