// SPDX-License-Identifier: Apache-2.0

package batcher

import (
	"math/bits"
	"slices"

	"github.com/ringbatch/ringbatch/policy"
)

// Preferred sizes: for each shape that is not full, the largest preferred size
// that packing in order reaches exactly. It is computed only when an idle
// worker could use it, and only for shapes whose queue changed since.

// markStale notes that the queue of shape s changed. A shape stays on the list
// while it is recycled, so it is never on it twice.
func (b *Batcher) markStale(s int32) {
	if len(b.settings.PreferredBatchSizes) == 0 {
		return
	}
	if sh := &b.shapes.shapes[s]; !sh.stale {
		sh.stale = true
		b.stale = append(b.stale, s)
	}
}

// refreshPreferred computes the preferred size of every stale shape.
func (b *Batcher) refreshPreferred(now Time) {
	for {
		s, at := b.reorders.first()
		if at > now {
			break
		}
		b.reorders.remove(s)
		b.markStale(int32(s))
	}
	for _, s := range b.stale {
		sh := &b.shapes.shapes[s]
		sh.stale = false
		b.reorders.remove(uint32(s))
		if rows := b.preferredRows(s, now); rows != sh.preferred {
			sh.preferred = rows
			b.refile(s, 0)
		}
	}
	b.stale = b.stale[:0]
}

func (b *Batcher) preferredRows(s int32, now Time) int32 {
	sh := &b.shapes.shapes[s]
	sizes := b.settings.PreferredBatchSizes
	if sh.full || int(sh.rows) < sizes[0] {
		return 0
	}
	if sh.large == 0 {
		// Single rows reach every size.
		i, exact := slices.BinarySearch(sizes, int(sh.rows))
		if !exact {
			i--
		}
		return int32(sizes[i])
	}
	return b.walkPreferred(s, now)
}

// walkPreferred adds up the queue of shape s in order. It is not full, so the
// walk is shorter than a batch. If ageing may change the order later, and with
// it the result, it sets the shape's timer in Batcher.reorders.
func (b *Batcher) walkPreferred(s int32, now Time) (best int32) {
	var at [policy.MaxLevels + 1]RequestID
	levels := b.shapes.shapes[s].levels
	for l := levels; l != 0; l &= l - 1 {
		level := uint8(bits.TrailingZeros64(l))
		at[level] = b.list(s, level).head
	}
	ageing := Time(b.settings.Ageing)
	reorder := ageing > 0 && levels&(levels-1) != 0
	next := Never
	rows, size := int32(0), 0
	for levels != 0 {
		level := b.firstOf(levels, func(level uint8) RequestID { return at[level] }, now)
		r := &b.requests[at[level]]
		rows += r.rows
		for size < len(b.settings.PreferredBatchSizes) && b.settings.PreferredBatchSizes[size] < int(rows) {
			size++
		}
		if size < len(b.settings.PreferredBatchSizes) && b.settings.PreferredBatchSizes[size] == int(rows) {
			best = rows
		}
		if reorder && b.rank(level, r.since, now) > 0 {
			next = min(next, r.since+((now-r.since)/ageing+1)*ageing)
		}
		if at[level] = b.inQueue[at[level]].next; at[level] == none {
			levels &^= 1 << level
		}
	}
	if next != Never {
		b.reorders.add(uint32(s), next, 0)
	}
	return best
}
