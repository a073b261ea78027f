// SPDX-License-Identifier: Apache-2.0

package batcher

import "math"

// Requests that are run again (rule 8). There is a list for each worker that
// retries avoid, so that finding one for a worker never means passing over
// thousands that it must not get.

// retryList is the list of the retries that avoid the same worker as r.
func (b *Batcher) retryList(r *request) *list {
	i := int(r.avoid + 1) // NoWorker wraps around to 0
	for len(b.retries) <= i {
		b.retries = append(b.retries, emptyList)
	}
	return &b.retries[i]
}

// nextRetry finds the oldest retry that an idle worker may get, and that worker. It returns
// none if there is no such retry. lacksRoom: an idle worker could get one if it held less.
func (b *Batcher) nextRetry() (first RequestID, w WorkerID, lacksRoom bool) {
	first = none
	if b.retrying == 0 {
		return first, NoWorker, false
	}
	for i := range b.retries {
		id := b.retries[i].head
		if id == none || first != none && b.requests[first].seq < b.requests[id].seq {
			continue
		}
		x, lacks := b.idleFor(id)
		lacksRoom = lacksRoom || lacks
		if x != NoWorker {
			first, w = id, x
		}
	}
	return first, w, lacksRoom
}

// idleFor chooses the idle worker that gets a retry. NoWorker: the retry waits for a busy worker, or
// (lacksRoom) until an idle one holds less.
func (b *Batcher) idleFor(id RequestID) (w WorkerID, lacksRoom bool) {
	r := &b.requests[id]
	avoid, others, trusted := r.avoid, 0, 0
	for i := range b.workers {
		if x := &b.workers[i]; x.attached && !x.Paused && WorkerID(i) != avoid {
			others++
			if !x.Doubted {
				trusted++
			}
		}
	}
	best := heapItem{id: uint32(NoWorker)}
	for _, x := range b.idle.items {
		avoided := others > 0 && WorkerID(x.id) == avoid
		doubted := trusted > 0 && b.workers[x.id].Doubted
		if avoided || doubted {
			continue
		}
		if !b.hasRoom(&b.workers[x.id], r) {
			lacksRoom = true
		} else if best.id == uint32(NoWorker) || x.less(best) {
			best = x
		}
	}
	return WorkerID(best.id), lacksRoom
}

// dispatchFrom gives w a batch of retries, or of a client in debt: the first of a list, and those
// behind it that fit and avoid the same worker.
func (b *Batcher) dispatchFrom(list chain, w WorkerID, first RequestID, now Time) {
	s, why, avoid := b.requests[first].shape, Alone, b.requests[first].avoid
	if b.requests[first].isRetry() {
		why = Retry
	}
	dims := b.shapes.shapes[s].dims
	slot, x := b.newBatch()
	before, rows, cost, most := len(b.ids), 0, 0, math.MaxInt
	for id := first; id != none; {
		r := &b.requests[id]
		n := len(b.ids) - before
		if r.isRetry() {
			most = min(most, int(r.share))
		}
		if n > 0 && (r.shape != s || r.isRetry() != (why == Retry) || r.avoid != avoid || n >= most ||
			rows+int(r.rows) > b.settings.MaxBatchSize || b.isTooCostly(cost+int(r.cost))) {
			break
		}
		next := list[id].next
		rows += int(r.rows)
		cost += int(r.cost)
		b.withdraw(id)
		b.start(r, x, slot, id)
		id = next
	}
	b.handOver(w, slot, Dispatch{Requests: b.ids[before:], Rows: rows, Cost: cost, Dims: dims, Why: why}, now)
}
