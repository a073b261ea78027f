// SPDX-License-Identifier: Apache-2.0

package batcher

import (
	"fmt"
	"math/rand/v2"
	"slices"

	"github.com/ringbatch/ringbatch/policy"
)

// book knows the requests and batches of a schedule from its events and decisions, so that the
// next events fit to them.
type book struct {
	settings policy.Settings
	requests []*booked // by id; nil if there is none
	workers  map[WorkerID]*bookedWorker
	batches  int // dispatched and not done
	commits  int
}

type booked struct {
	Request    // Level, Deadline and Dims as they count
	commit     int
	running    BatchID // 0 while it waits
	clientLeft bool
}

type bookedWorker struct {
	Worker
	batches []BatchID
}

func newBook(settings policy.Settings, ids int) *book {
	return &book{settings: settings, requests: make([]*booked, ids), workers: map[WorkerID]*bookedWorker{}}
}

// freeID is a random id that no request has.
func (b *book) freeID(rng *rand.Rand) (RequestID, bool) {
	start := rng.IntN(len(b.requests))
	for i := range b.requests {
		id := RequestID((start + i) % len(b.requests))
		if b.requests[id] == nil {
			return id, true
		}
	}
	return 0, false
}

func (b *book) someBatch(rng *rand.Rand) (WorkerID, BatchID, bool) {
	start := rng.IntN(3)
	for i := range 3 {
		w := b.workers[WorkerID((start+i)%3)]
		if w != nil && len(w.batches) > 0 {
			return w.ID, w.batches[rng.IntN(len(w.batches))], true
		}
	}
	return 0, 0, false
}

func (b *book) arrived(r Request) {
	if r.Level == DefaultLevel {
		r.Level = b.settings.DefaultPriority
	}
	r.Dims, _ = bucket(&b.settings, r.Dims)
	if most := b.settings.Level(r.Level).MaxTimeout; most > 0 {
		r.Deadline = min(r.Deadline, r.Arrived+Time(most))
	}
	if r.Cost == 0 {
		r.Cost = max(1, int(r.Dims[0]))
	}
	b.commits++
	b.requests[r.ID] = &booked{Request: r, commit: b.commits}
}

func (b *book) requeued(r Request) {
	x := b.requests[r.ID]
	x.running, x.Share, x.Avoid = 0, r.Share, r.Avoid
}

func (b *book) ended(id RequestID) {
	if x := b.requests[id]; x != nil && x.running != 0 {
		b.requests[id] = nil
	}
}

func (b *book) cancelled(id RequestID, done bool) error {
	x := b.requests[id]
	if waiting := x != nil && x.running == 0; waiting != done {
		return fmt.Errorf("Cancel(%d) is %v, but waiting is %v", id, done, waiting)
	}
	if done {
		b.requests[id] = nil
	}
	return nil
}

func (b *book) clientLeft(c ClientID, cancelled []RequestID) {
	for _, id := range cancelled {
		b.requests[id] = nil
	}
	for _, r := range b.requests {
		if r != nil && r.Client == c {
			r.clientLeft = true
		}
	}
}

func (b *book) workerReady(w Worker) {
	if old := b.workers[w.ID]; old != nil {
		old.Worker = w
		return
	}
	b.workers[w.ID] = &bookedWorker{Worker: w}
}

// workerGone returns the requests that the worker was running.
func (b *book) workerGone(id WorkerID) []*booked {
	w := b.workers[id]
	if w == nil {
		return nil
	}
	delete(b.workers, id)
	b.batches -= len(w.batches)
	return b.requestsOf(w.batches...)
}

// requestsOf are the requests that run in some batches.
func (b *book) requestsOf(batches ...BatchID) (all []*booked) {
	for _, r := range b.requests {
		if r != nil && r.running != 0 && slices.Contains(batches, r.running) {
			all = append(all, r)
		}
	}
	slices.SortFunc(all, func(x, y *booked) int { return x.commit - y.commit })
	return all
}

func (b *book) batchDone(id WorkerID, batch BatchID) {
	w := b.workers[id]
	w.batches = slices.DeleteFunc(w.batches, func(x BatchID) bool { return x == batch })
	b.batches--
	for id, r := range b.requests {
		if r != nil && r.running == batch {
			b.requests[id] = nil
		}
	}
}

// decided checks that a request ends or goes out once, in time, in no batch that is too large.
func (b *book) decided(now Time, d *Decisions) error {
	for _, end := range d.Ended {
		if r := b.requests[end.ID]; r == nil || r.running != 0 {
			return fmt.Errorf("%d ended but was not waiting", end.ID)
		}
		b.requests[end.ID] = nil
	}
	for _, x := range d.Dispatches {
		w, rows, cost := b.workers[x.Worker], 0, 0
		if w == nil || w.Paused || len(w.batches) >= max(1, w.Lanes, w.Depth) {
			return fmt.Errorf("batch %d: worker %d cannot take it: %+v", x.Batch, x.Worker, w)
		}
		for _, id := range x.Requests {
			r := b.requests[id]
			if r == nil || r.running != 0 || r.Deadline <= now || r.Dims != x.Dims {
				return fmt.Errorf("batch %d: request %d cannot be in it: %+v", x.Batch, id, r)
			}
			r.running, rows, cost = x.Batch, rows+r.Rows, cost+r.Rows*r.Cost
		}
		most := b.settings.MaxBatchCost
		if rows > b.settings.MaxBatchSize || most > 0 && cost > most && len(x.Requests) > 1 {
			return fmt.Errorf("batch %d is too large: %d rows, cost %d", x.Batch, rows, cost)
		}
		w.batches = append(w.batches, x.Batch)
		b.batches++
	}
	return nil
}

// allEnded checks that nothing is left, neither here nor in the batcher.
func (b *book) allEnded(x *Batcher) error {
	for id, r := range b.requests {
		if r != nil {
			return fmt.Errorf("request %d is left over: %+v", id, r)
		}
	}
	if x.queued != 0 || x.owed != (Queue{}) || x.queuedRows != 0 || x.queuedCost != 0 || x.dated != 0 || x.retrying != 0 ||
		x.anything.occupied|x.ready.occupied|x.full.occupied != 0 {
		return fmt.Errorf("books are not empty: %d requests, %d rows", x.queued, x.queuedRows)
	}
	for i := range x.shapes.shapes {
		if s := &x.shapes.shapes[i]; s.requests != 0 || s.rows != 0 || s.cost != 0 || s.due != 0 || s.large != 0 || s.levels != 0 {
			return fmt.Errorf("shape %d is not empty: %+v", i, *s)
		}
	}
	if x.shapes.used != 0 || len(x.shapes.free) != len(x.shapes.shapes)-1 {
		return fmt.Errorf("%d shapes are not recycled", x.shapes.used)
	}
	if x.readies.listed+len(x.readies.heap.items)+x.changes.listed+len(x.changes.heap.items) != 0 {
		return fmt.Errorf("timers are left over")
	}
	for i := range x.clients {
		if c := &x.clients[i]; c.inFlight != 0 || c.running != 0 || c.waiting != emptyList || c.runEnd != none || c.runRows != 0 {
			return fmt.Errorf("client %d is not empty: %+v", i, *c)
		}
	}
	return nil
}
