// SPDX-License-Identifier: Apache-2.0

package batcher

import "math"

// packing is how what is queued divides into batches. A batch takes requests in
// order and none in part, so where requests have several rows most full batches have
// some room left, and a queue makes more of them than its rows would fill.
//
// It follows the order of arrival. With several shapes or levels, and after requests
// of several rows that were canceled, it is off by a part of a batch.
type packing struct {
	last int     // rows of the last batch that the queue makes
	full float64 // rows of a full batch on average, lately; 0: none was seen
	seen int     // full batches, up to packingMemory
}

// packingMemory is how many full batches the average is of.
const packingMemory = 32

// put is what becomes of a request that joins a queue of so many rows: how many
// batches go before its own, and the rows of that one so far, with it.
func (p *packing) put(rows, queuedRows, most int) (before, own int) {
	last := p.lastOf(queuedRows, most)
	before = p.count(queuedRows-last, most)
	if last+rows > most {
		return before + 1, rows
	}
	return before, last + rows
}

// lastOf is the rows of the last batch of so many. What was followed is left where the
// others cannot be full batches: requests left the queue meanwhile.
func (p *packing) lastOf(queuedRows, most int) int {
	full := p.rowsOf(most)
	rest := queuedRows - int(float64(queuedRows/p.fullRows(most))*full)
	if full == float64(most) { // all are quite full
		return rest
	}
	last := min(p.last, queuedRows)
	if off := float64(queuedRows-last) - float64(p.count(queuedRows-last, most))*full; math.Abs(off) > full/3 {
		return max(0, rest)
	}
	return last
}

// count is how many full batches so many rows are.
func (p *packing) count(rows, most int) int {
	return int(math.Round(float64(rows) / p.rowsOf(most)))
}

// rowsOf is what a full batch has of at most so many rows.
func (p *packing) rowsOf(most int) float64 {
	if p.full == 0 {
		return float64(most)
	}
	return min(p.full, float64(most))
}

// fullRows is the same as a whole number.
func (p *packing) fullRows(most int) int { return int(math.Round(p.rowsOf(most))) }

// arrived follows put for a request that was queued.
func (p *packing) arrived(rows, queuedRows, most int) { _, p.last = p.put(rows, queuedRows, most) }

func (p *packing) dispatched(d *Dispatch) {
	if d.Why != Full {
		return
	}
	p.seen = min(p.seen+1, packingMemory)
	p.full += (float64(d.Rows) - p.full) / float64(p.seen)
}
