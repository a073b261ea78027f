// SPDX-License-Identifier: Apache-2.0

package batcher

import "slices"

// worker is the record of one worker, at index WorkerID of Batcher.workers.
//
// Workers are chosen by stride scheduling: pass is the number of rows the
// worker was given, divided by its weight, and the smallest pass goes first.
// A new worker, or one that was paused, starts at the smallest pass there is, so
// it neither has to catch up nor is flooded until it has.
type worker struct {
	Worker
	attached bool
	pass     int64
	batches  []int32 // what it holds, oldest first; indexes in Batcher.batches
}

// passScale is the pass of one row at weight 1. 2^63 is reached after 10^14
// rows: four years at a million rows a second.
const passScale = 1 << 16

// batch is one dispatched batch; its requests are linked by Batcher.inQueue.
type batch struct {
	id       BatchID
	requests list
	rows     int
	dims     Dims
}

// Run is what is known of a batch that was run, for a policy to learn from.
type Run struct {
	Worker            WorkerID
	Rows              int
	Dims              Dims // its shape
	Started, Finished Time // by the worker's word, bounded by the caller
}

// WorkerReady tells that w attached, or that it changed its description.
func (b *Batcher) WorkerReady(w Worker) {
	w.Weight = max(1, w.Weight)
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

// WorkerGone tells that w is gone. Its running requests stay in the books
// until the caller has called Ended or Requeue for each of them.
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
	x.batches = x.batches[:0]
	x.attached = false
	b.advisor.WorkerGone(w)
	b.idle.remove(uint32(w))
	b.roomy.remove(uint32(w))
}

// BatchDone tells that w has finished batch, and when it ran: its place is free
// again, and those of the batch's requests that have not ended yet end now. It
// does nothing if w does not hold the batch.
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
		b.lastRun = Run{w, b.batches[slot].rows, b.batches[slot].dims, started, max(started, finished)}
		b.advisor.BatchDone(w, id, started, max(started, finished))
		b.freeBatches = append(b.freeBatches, slot)
		x.batches = slices.Delete(x.batches, i, i+1)
		b.fileWorker(w)
		return
	}
}

// Unanswered tells that nobody of batch has a result: it failed, or all had ended
// before the worker took it. It comes before BatchDone, and what the batch took
// tells nothing about its size, if that is far less.
func (b *Batcher) Unanswered(w WorkerID, id BatchID) {
	b.advisor.BatchUnanswered(w, id)
}

// LastRun is the batch of the last BatchDone.
func (b *Batcher) LastRun() Run { return b.lastRun }

// fileWorker puts w where Decide looks for it: among the idle ones, among the
// busy ones with room for another batch, or nowhere.
func (b *Batcher) fileWorker(w WorkerID) {
	x := &b.workers[w]
	id := uint32(w)
	switch n := len(x.batches); {
	case x.Paused:
		b.idle.remove(id)
		b.roomy.remove(id)
	case n < x.Lanes:
		b.roomy.remove(id)
		b.idle.set(id, x.pass, int64(w))
	case n < x.Depth:
		b.idle.remove(id)
		b.roomy.set(id, x.pass, int64(w))
	default:
		b.idle.remove(id)
		b.roomy.remove(id)
	}
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
