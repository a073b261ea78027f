// SPDX-License-Identifier: Apache-2.0

package batcher

import (
	"fmt"
	"math/rand/v2"
	"slices"

	"github.com/ringbatch/ringbatch/policy"
)

// book checks the promises of the rules for any scheduler: no request is lost, dispatched twice or
// after its deadline, no batch is over its maximum, urgency and arrival order hold within a shape,
// and no request waits in vain. It knows requests and batches only from events and decisions.
type book struct {
	settings  policy.Settings
	requests  []*booked // by id; nil if there is none
	workers   map[WorkerID]*bookedWorker
	batches   int // dispatched and not done
	lastBatch BatchID
	commits   int
	owes      func(ClientID) bool
	overdue   Time // until when batches that are not full are held back
}

type booked struct {
	Request        // Level, Deadline and Dims as they count
	commit         int
	running        BatchID // 0 while it waits
	clientLeft     bool
	queueTimeoutAt Time
	delayed        bool
	owed           bool // its client was in debt, so it may have lost its place
	wait           Time // in force when it began to wait
}

type bookedWorker struct {
	Worker
	batches []BatchID
	costs   map[BatchID]int
	alone   bool // it runs a request that was in a worker that died, and has several lanes
}

func newBook(settings policy.Settings, ids int) *book {
	return &book{settings: settings, requests: make([]*booked, ids), workers: map[WorkerID]*bookedWorker{}}
}

func (b *book) setPolicy(settings policy.Settings, wait Time) {
	b.settings = settings
	for _, r := range b.requests {
		if r != nil {
			r.wait = wait
		}
	}
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

func (b *book) arrived(now Time, r Request, wait Time) {
	if r.Level == DefaultLevel {
		r.Level = b.settings.DefaultPriority
	}
	r.Dims, _ = bucket(&b.settings, r.Dims)
	if r.Cost == 0 {
		r.Cost = max(1, int(r.Dims[0]))
	}
	policy := b.settings.Level(r.Level)
	timeout := Never
	if policy.DefaultTimeout > 0 {
		timeout = r.Arrived + Time(policy.DefaultTimeout)
	}
	if policy.MaxTimeout > 0 {
		r.Deadline = min(r.Deadline, r.Arrived+Time(policy.MaxTimeout))
	}
	b.commits++
	b.requests[r.ID] = &booked{Request: r, commit: b.commits, queueTimeoutAt: timeout, wait: wait}
}

func (b *book) requeued(r Request, wait Time) {
	x := b.requests[r.ID]
	x.running, x.Share, x.Avoid, x.queueTimeoutAt, x.delayed, x.wait = 0, r.Share, r.Avoid, Never, false, wait
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
	b.workers[w.ID] = &bookedWorker{Worker: w, costs: map[BatchID]int{}}
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
	w.batches, w.alone = slices.DeleteFunc(w.batches, func(x BatchID) bool { return x == batch }), false
	delete(w.costs, batch)
	b.batches--
	for id, r := range b.requests {
		if r != nil && r.running == batch {
			b.requests[id] = nil
		}
	}
}

// noteDebts notes, before Decide, whose requests may lose their places.
func (b *book) noteDebts() {
	for _, r := range b.requests {
		if r != nil {
			r.owed = r.owed || b.owes(r.Client)
		}
	}
}

func (b *book) decided(now Time, d *Decisions) error {
	for _, end := range d.Ended {
		r := b.requests[end.ID]
		if r == nil || r.running != 0 {
			return fmt.Errorf("%d ended but was not waiting", end.ID)
		}
		at := r.Deadline
		if end.Why == TimedOut {
			at = r.queueTimeoutAt
		}
		if at > now {
			return fmt.Errorf("%d ended (%v) at %d, before %d", end.ID, end.Why, now, at)
		}
		b.requests[end.ID] = nil
	}
	for _, r := range b.requests {
		if r != nil && r.queueTimeoutAt <= now && r.running == 0 {
			r.delayed = true
		}
	}
	for _, x := range d.Dispatches {
		if err := b.dispatched(now, x); err != nil {
			return fmt.Errorf("batch %d: %w", x.Batch, err)
		}
	}
	if d.Wake <= now {
		return fmt.Errorf("at %d: wake at %d would spin", now, d.Wake)
	}
	return b.nothingWaitsInVain(now)
}

func (b *book) dispatched(now Time, d Dispatch) error {
	b.lastBatch++
	w := b.workers[d.Worker]
	switch {
	case d.Batch != b.lastBatch:
		return fmt.Errorf("batches are not numbered in order")
	case w == nil:
		return fmt.Errorf("worker %d is not attached", d.Worker)
	case w.Paused:
		return fmt.Errorf("worker %d is paused", d.Worker)
	case len(d.Requests) == 0:
		return fmt.Errorf("is empty")
	case !b.hasRoom(w, b.requests[d.Requests[0]]):
		return fmt.Errorf("worker %d has no room beside %v", d.Worker, w.batches)
	case len(w.batches) >= max(1, w.Lanes, w.Depth):
		return fmt.Errorf("worker %d holds %d batches already", d.Worker, len(w.batches))
	case len(w.batches) >= max(1, w.Lanes) && d.Why != Full:
		return fmt.Errorf("worker %d is busy and got a batch that is %v", d.Worker, d.Why)
	case len(w.batches) >= max(1, w.Lanes) && b.idle():
		return fmt.Errorf("worker %d is busy and another is idle", d.Worker)
	case d.PadTo < d.Rows:
		return fmt.Errorf("padded to %d rows, has %d", d.PadTo, d.Rows)
	case d.Why == Preferred && !slices.Contains(b.settings.PreferredBatchSizes, d.Rows):
		return fmt.Errorf("%d rows are no preferred size", d.Rows)
	}
	rows, cost := 0, 0
	var last *booked
	for _, id := range d.Requests {
		r := b.requests[id]
		switch {
		case r == nil || r.running != 0:
			return fmt.Errorf("request %d is not waiting", id)
		case r.Deadline <= now:
			return fmt.Errorf("request %d has expired at %d", id, r.Deadline)
		case b.owes(r.Client) && (r.Client != b.requests[d.Requests[0]].Client || d.Why != Alone && d.Why != Retry):
			return fmt.Errorf("request %d of client %d, which is in debt, goes out with others as %v", id, r.Client, d.Why)
		case !b.owes(r.Client) && d.Why == Alone:
			return fmt.Errorf("request %d goes out alone, and client %d is not in debt", id, r.Client)
		case r.Dims != d.Dims:
			return fmt.Errorf("request %d has dims %v, the batch %v", id, r.Dims, d.Dims)
		case r.Share > 0 && len(d.Requests) > r.Share:
			return fmt.Errorf("request %d shares its batch with %d others, %d are the most of it", id, len(d.Requests)-1, r.Share)
		case (r.Share > 0) != (d.Why == Retry):
			return fmt.Errorf("request %d with share %d goes out as %v", id, r.Share, d.Why)
		case r.Share > 0 && !b.mayRetry(w, r):
			return fmt.Errorf("request %d is tried again by worker %d, and another one could", id, d.Worker)
		}
		if b.settings.PreserveOrder {
			if err := b.keepsOrder(r, d.Batch); err != nil {
				return err
			}
		}
		if last != nil && r.Share == 0 && b.strictOrder() && b.before(r, last) {
			return fmt.Errorf("request %d is packed after %d", id, last.ID)
		}
		r.running = d.Batch
		rows += r.Rows
		cost += r.Rows * r.Cost
		last = r
	}
	if rows != d.Rows || rows > b.settings.MaxBatchSize {
		return fmt.Errorf("has %d rows, says %d, maximum %d", rows, d.Rows, b.settings.MaxBatchSize)
	}
	if most := b.settings.MaxBatchCost; cost != d.Cost || most > 0 && cost > most && len(d.Requests) > 1 {
		return fmt.Errorf("costs %d, says %d, maximum %d", cost, d.Cost, most)
	}
	if b.strictOrder() && !b.settings.PreserveOrder && last.Share == 0 {
		for _, r := range b.requests {
			if r != nil && r.running == 0 && r.Share == 0 && r.Dims == d.Dims && b.before(r, last) {
				return fmt.Errorf("request %d went before %d", last.ID, r.ID)
			}
		}
	}
	w.batches, w.costs[d.Batch] = append(w.batches, d.Batch), d.Cost
	w.alone = w.Lanes > 1 && b.requests[d.Requests[0]].ranWithDead()
	b.batches++
	return nil
}

func (r *booked) ranWithDead() bool { return r.Share == 1 && r.Avoid == NoWorker }

// hasRoom says whether a worker may have a request beside what it holds.
func (b *book) hasRoom(w *bookedWorker, r *booked) bool {
	cost := r.Rows * r.Cost
	for _, c := range w.costs {
		cost += c
	}
	most := b.settings.MaxBatchCost
	return len(w.batches) == 0 || !w.alone && !(w.Lanes > 1 && r.ranWithDead()) && (b.settings.MaxBatchSize > 1 || most == 0 || cost <= most)
}

// mayRetry says whether a worker may get a retry: the retry does not avoid it, and it is not doubted,
// unless no such worker serves.
func (b *book) mayRetry(w *bookedWorker, r *booked) bool {
	for _, other := range b.workers {
		if other == w || other.Paused || other.ID == r.Avoid {
			continue
		}
		if w.ID == r.Avoid || w.Doubted && !other.Doubted {
			return false
		}
	}
	return true
}

func (b *book) idle() bool {
	for _, w := range b.workers {
		if !w.Paused && !w.alone && len(w.batches) < max(1, w.Lanes) {
			return true
		}
	}
	return false
}

// overtaken says whether a request that waits for room holds the others back.
func (b *book) overtaken() bool {
	for _, r := range b.requests {
		if r != nil && r.running == 0 && (r.ranWithDead() || b.settings.MaxBatchSize == 1 && b.settings.MaxBatchCost > 0) {
			return true
		}
	}
	return false
}

// strictOrder says whether level and commit alone determine the order.
func (b *book) strictOrder() bool { return b.settings.Ageing == 0 }

func (b *book) before(x, y *booked) bool {
	switch {
	case x.owed || y.owed || x.delayed && y.delayed:
		return false // by the time they timed out; left to the reference
	case x.delayed != y.delayed:
		return y.delayed
	case x.Level != y.Level:
		return x.Level < y.Level
	}
	return x.commit < y.commit
}

func (b *book) keepsOrder(r *booked, batch BatchID) error {
	for _, x := range b.requests {
		if x == nil || x.Client != r.Client || x.clientLeft || x == r {
			continue
		}
		if x.running != 0 && x.running != batch {
			return fmt.Errorf("client %d runs in batch %d too", r.Client, x.running)
		}
		if x.running == 0 && x.commit < r.commit {
			return fmt.Errorf("request %d overtakes %d of client %d", r.ID, x.ID, r.Client)
		}
	}
	return nil
}

// nothingWaitsInVain checks that an idle worker finds nothing more to do.
func (b *book) nothingWaitsInVain(now Time) error {
	idle, held, overtaken := b.idle(), b.held(now), b.overtaken()
	runs := map[ClientID]bool{}
	for _, r := range b.requests {
		if r != nil && r.running != 0 && !r.clientLeft {
			runs[r.Client] = true
		}
	}
	rows, cost, most := map[Dims]int{}, map[Dims]int{}, b.settings.MaxBatchCost
	for _, r := range b.requests {
		if r == nil || r.running != 0 {
			continue
		}
		if r.Deadline <= now {
			return fmt.Errorf("request %d waits at %d after its deadline %d", r.ID, now, r.Deadline)
		}
		if !idle || b.owes(r.Client) || (b.settings.PreserveOrder && (runs[r.Client] || !b.firstOfClient(r))) {
			continue
		}
		if r.Share > 0 && !overtaken {
			for _, w := range b.workers {
				if !w.Paused && !w.alone && len(w.batches) < max(1, w.Lanes) && b.mayRetry(w, r) {
					return fmt.Errorf("request %d is a retry and worker %d is idle", r.ID, w.ID)
				}
			}
		}
		if overtaken || r.Share > 0 {
			continue
		}
		ready := r.Arrived + r.wait
		if r.Deadline != Never {
			ready = min(ready, r.Arrived+(r.Deadline-r.Arrived)/2)
		}
		if ready <= now && !held {
			return fmt.Errorf("request %d waits at %d, was ready at %d and a worker is idle", r.ID, now, ready)
		}
		if cost[r.Dims] += r.Rows * r.Cost; most > 0 && cost[r.Dims] >= most && (!held || len(b.shapes()) == 1) {
			return fmt.Errorf("rows of cost %d of shape %v wait and a worker is idle", cost[r.Dims], r.Dims)
		}
		if rows[r.Dims] += r.Rows; rows[r.Dims] >= b.settings.MaxBatchSize && (!held || len(b.shapes()) == 1) {
			return fmt.Errorf("%d rows of shape %v wait and a worker is idle", rows[r.Dims], r.Dims)
		}
	}
	return nil
}

// held says whether batches that are not full may wait for a running batch.
func (b *book) held(now Time) bool {
	for _, r := range b.requests {
		if r != nil && r.running == 0 && r.Deadline != Never {
			return false
		}
	}
	return b.batches > 0 && now < b.overdue
}

// shapes are the shapes of the waiting requests.
func (b *book) shapes() map[Dims]bool {
	all := map[Dims]bool{}
	for _, r := range b.requests {
		if r != nil && r.running == 0 {
			all[r.Dims] = true
		}
	}
	return all
}

func (b *book) firstOfClient(r *booked) bool {
	for _, x := range b.requests {
		if x != nil && x.Client == r.Client && !x.clientLeft && x.running == 0 && x.commit < r.commit {
			return false
		}
	}
	return true
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
