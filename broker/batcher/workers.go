// SPDX-License-Identifier: Apache-2.0

package batcher

import "slices"

// worker is the record of one worker, at index WorkerID of Batcher.workers.
//
// Workers are chosen by stride scheduling: pass is the number of rows that the worker was given,
// divided by its share, and the smallest pass goes first. A new worker, and a worker after its
// pause, start at the smallest pass: they need not catch up.
type worker struct {
	Worker
	attached bool
	pass     int64
	batches  []int32 // the batches that it holds, oldest first; indexes in Batcher.batches
	cost     int     // of these
	alone    bool    // it runs a request that was in a worker that died, and nothing else
}

// passScale is the pass of one row at share 1. 2^63 is reached after 10^14
// rows: four years at a million rows a second.
const passScale = 1 << 16

// batch is one dispatched batch; its requests are linked by Batcher.inQueue.
type batch struct {
	id       BatchID
	requests list
	cost     int
}

// WorkerReady reports that w attached, or changed its description.
func (b *Batcher) WorkerReady(w Worker) {
	w.Share = max(1, w.Share)
	w.Lanes = max(1, w.Lanes)
	w.Depth = max(w.Lanes, w.Depth)
	b.workers = grown(b.workers, int(w.ID))
	x := &b.workers[w.ID]
	if !x.attached {
		*x = worker{attached: true, pass: b.smallestPass(), batches: x.batches[:0]}
	} else if x.Paused && !w.Paused {
		x.pass = max(x.pass, b.smallestPass())
	}
	x.Worker = w
	b.fileWorker(w.ID)
	b.advisor.WorkerReady(w)
}

// smallestPass of the attached workers that are not paused, 0 if there is none.
func (b *Batcher) smallestPass() int64 {
	pass, found := int64(0), false
	for i := range b.workers {
		if x := &b.workers[i]; x.attached && !x.Paused && (!found || x.pass < pass) {
			pass, found = x.pass, true
		}
	}
	return pass
}

// WorkerGone reports that w is gone. Its running requests stay known until the caller has called
// Ended or Requeue for each of them.
func (b *Batcher) WorkerGone(w WorkerID) {
	if int(w) >= len(b.workers) || !b.workers[w].attached {
		return
	}
	x := &b.workers[w]
	for _, slot := range x.batches {
		for id := b.batches[slot].requests.head; id != none; id = b.inQueue[id].next {
			b.requests[id].batch = -1
		}
		b.freeBatches = append(b.freeBatches, slot)
	}
	x.batches, x.cost, x.alone = x.batches[:0], 0, false
	x.attached = false
	b.advisor.WorkerGone(w)
	b.idle.remove(uint32(w))
	b.roomy.remove(uint32(w))
}

// BatchDone reports that w has finished a batch, and when it ran. The worker's place is free again,
// and the batch's remaining requests end. BatchDone does nothing if w does not hold the batch.
func (b *Batcher) BatchDone(w WorkerID, id BatchID, started, finished Time) {
	if int(w) >= len(b.workers) {
		return
	}
	x := &b.workers[w]
	for i, slot := range x.batches {
		if b.batches[slot].id != id {
			continue
		}
		for r := b.batches[slot].requests.head; r != none; {
			next := b.inQueue[r].next
			b.endRunning(r, max(started, finished))
			r = next
		}
		b.advisor.BatchDone(w, id, started, max(started, finished))
		b.freeBatches = append(b.freeBatches, slot)
		x.batches = slices.Delete(x.batches, i, i+1)
		x.cost, x.alone = x.cost-b.batches[slot].cost, false
		b.fileWorker(w)
		return
	}
}

// Unanswered reports, before BatchDone, that no client has a result of the batch: it failed, or its
// requests had ended before the worker took it.
func (b *Batcher) Unanswered(w WorkerID, id BatchID) {
	if int(w) < len(b.workers) && b.workers[w].attached {
		b.advisor.BatchUnanswered(w, id)
	}
}

// fileWorker puts w where Decide looks for it: among the idle ones, among the
// busy ones with room for another batch, or nowhere.
func (b *Batcher) fileWorker(w WorkerID) {
	x := &b.workers[w]
	id := uint32(w)
	b.idle.remove(id)
	b.roomy.remove(id)
	switch n := len(x.batches); {
	case x.Paused || x.alone:
	case n < x.Lanes:
		b.idle.set(id, x.pass, int64(w))
	case n < x.Depth:
		b.roomy.set(id, x.pass, int64(w))
	}
}

// hasRoom says whether an idle worker, or a busy one with room, may have a request now. Batches on the lanes of a
// worker run together, so a request that was in a worker that died needs all lanes. With a max_batch_size of 1
// max_batch_cost limits all that a worker holds.
func (b *Batcher) hasRoom(x *worker, r *request) bool {
	if len(x.batches) == 0 {
		return true
	}
	return !(x.Lanes > 1 && r.ranWithDead()) && (b.settings.MaxBatchSize > 1 || !b.isTooCostly(x.cost+int(r.cost)))
}

// workerFor is the worker of a heap that gets the request: with room, the fewest rows for its share. NoWorker: none.
func (b *Batcher) workerFor(h *minHeap, r *request) WorkerID {
	if w := h.min(); b.hasRoom(&b.workers[w.id], r) {
		return WorkerID(w.id)
	}
	best := heapItem{id: uint32(NoWorker)}
	for _, x := range h.items {
		if b.hasRoom(&b.workers[x.id], r) && (best.id == uint32(NoWorker) || x.less(best)) {
			best = x
		}
	}
	return WorkerID(best.id)
}

// newBatch opens an empty batch record.
func (b *Batcher) newBatch() (slot int32, x *batch) {
	if n := len(b.freeBatches); n > 0 {
		slot = b.freeBatches[n-1]
		b.freeBatches = b.freeBatches[:n-1]
	} else {
		slot = int32(len(b.batches))
		b.batches = append(b.batches, batch{})
	}
	b.lastBatch++
	x = &b.batches[slot]
	*x = batch{id: b.lastBatch, requests: emptyList}
	return slot, x
}
