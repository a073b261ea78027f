// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"errors"
	"math/rand/v2"
	"slices"
	"sort"
	"time"

	"github.com/ringbatch/ringbatch/broker/batcher"
)

// arrive gives a request to the batcher, one hop after its commit.
func (w *world) arrive(e *event) {
	committed := e.started
	w.stats.first, w.stats.lastCommit = min(w.stats.first, committed), max(w.stats.lastCommit, committed)
	f := flight{
		committed: committed, deadline: batcher.Never, client: e.client,
		rows: randomIn(w.rng, w.cfg.Load.MinRows, w.cfg.Load.MaxRows), level: w.randomLevel(),
		cost: randomIn(w.rng, w.cfg.Load.MinTokens, w.cfg.Load.MaxTokens), rounds: w.randomRounds(),
	}
	if f.level == batcher.DefaultLevel {
		f.level = w.cfg.Policy.DefaultPriority
	}
	if w.cfg.Load.Deadline > 0 {
		f.deadline = committed + batcher.Time(w.cfg.Load.Deadline)
	}
	f.deadline = batcher.DeadlineOf(&w.cfg.Policy, f.level, committed, f.deadline)
	r := batcher.Request{
		ID: w.newID(), Client: e.client, Rows: f.rows, Level: f.level,
		Arrived: committed, Deadline: f.deadline, Cost: f.cost,
	}
	if w.cfg.HideDeadlines {
		r.Deadline = batcher.Never
	}
	if w.cfg.Load.Shapes > 1 {
		r.Dims[0] = 1 + uint32(w.rng.IntN(w.cfg.Load.Shapes))
	}
	w.flights[r.ID] = f
	w.enter(r)
	w.cfg.Arrivals.committed(w)
}

// enter gives a request to the batcher.
func (w *world) enter(r batcher.Request) {
	f := &w.flights[r.ID]
	switch err := w.b.Arrive(w.now, r); {
	case err == nil:
	case errors.Is(err, batcher.ErrExpired):
		w.free = append(w.free, r.ID)
		w.stats.outcomes.Expired++
		w.answer(f, w.now)
	default: // the queue is full, the request would be late, or its level or size is not possible
		w.free = append(w.free, r.ID)
		w.stats.outcomes.Refused++
		w.answer(f, w.now+refusalPause)
	}
}

// answer informs the client, one hop away, that its request ended.
func (w *world) answer(f *flight, at batcher.Time) {
	w.cfg.Arrivals.answered(w, f.client, at+batcher.Time(w.cfg.Hop))
}

// decide carries out the decisions of the batcher, and returns when to decide again at the latest.
func (w *world) decide() batcher.Time {
	d := w.b.Decide(w.now)
	for _, e := range d.Ended {
		if e.Why == batcher.Expired {
			w.stats.outcomes.Expired++
		} else {
			w.stats.outcomes.TimedOut++
		}
		w.answer(&w.flights[e.ID], w.now)
		w.free = append(w.free, e.ID)
	}
	for i := range d.Dispatches {
		w.serve(&d.Dispatches[i])
	}
	w.b.Learn(w.now)
	return d.Wake
}

// serve lets a worker run a batch. The end of the batch is known at once.
func (w *world) serve(d *batcher.Dispatch) {
	x := &w.workers[d.Worker]
	if x.lanes != nil {
		w.serveInLane(d)
		return
	}
	start := max(w.now+batcher.Time(w.cfg.Hop), x.freeAt)
	size := d.PadTo
	if w.cfg.Load.MaxTokens > 0 {
		size = d.Cost
	}
	rounds := 1
	for _, id := range d.Requests {
		rounds = max(rounds, w.flights[id].rounds)
	}
	took := batcher.Time(min(w.cfg.took(size, w.othersBusy(start, x))*float64(rounds)*w.phase(start).Cost, float64(endOfTime)))
	if w.cfg.disturb != nil {
		took = w.cfg.disturb(d.Worker, d.PadTo, start, took)
	}
	x.freeAt = min(start+took, 2*endOfTime)
	x.busy += x.freeAt - start
	x.total++
	x.rows += d.Rows

	x.given = append(x.given, slices.Clone(d.Requests))
	seen := x.freeAt + batcher.Time(w.cfg.Hop)
	w.events.push(event{at: seen, worker: d.Worker, batch: d.Batch, started: start, finished: x.freeAt})

	w.stats.batch(d)
	for _, id := range d.Requests {
		w.deliver(id, seen)
	}
}

// deliver counts the answer of a request, which its client sees at a time.
func (w *world) deliver(id batcher.RequestID, seen batcher.Time) {
	f := &w.flights[id]
	w.stats.last = max(w.stats.last, seen)
	w.stats.answer(f, seen)
	if w.answered != nil {
		w.answered(f.committed, seen)
	}
	// A caller does not wait for longer than its deadline.
	w.cfg.Arrivals.answered(w, f.client, min(seen, f.deadline))
}

// othersBusy is how many workers other than x are busy at a time.
func (w *world) othersBusy(at batcher.Time, x *simulatedWorker) (n int) {
	for i := range w.workers {
		if y := &w.workers[i]; y != x && y.freeAt > at {
			n++
		}
	}
	return n
}

func (w *world) newID() batcher.RequestID {
	if n := len(w.free); n > 0 {
		id := w.free[n-1]
		w.free = w.free[:n-1]
		return id
	}
	w.flights = append(w.flights, flight{})
	return batcher.RequestID(len(w.flights) - 1)
}

// randomIn is a number of a range; 0 means 1.
func randomIn(rng *rand.Rand, low, high int) int {
	low, high = max(1, low), max(1, high)
	if low == high {
		return low
	}
	return low + rng.IntN(high-low+1)
}

func (w *world) randomLevel() int {
	if len(w.shares) == 0 {
		return batcher.DefaultLevel
	}
	at := w.rng.Float64() * w.shares[len(w.shares)-1]
	return min(sort.SearchFloat64s(w.shares, at), len(w.shares)-1)
}

// result sums up the simulation.
func (w *world) result() *Result {
	r := w.stats.result()
	if w.cfg.Load.MaxTokens > 0 {
		r.MeanBatchTokens = float64(w.stats.cost) / float64(max(1, r.Batches))
	}
	for i := range w.workers {
		x := &w.workers[i]
		u := 0.0
		if r.Span > 0 {
			u = float64(x.busy) / float64(r.Span)
		}
		if x.lanes != nil {
			r.Rounds += x.lanes.rounds
			r.MeanRoundRows += float64(x.lanes.rows)
		}
		r.Workers = append(r.Workers, WorkerResult{Utilisation: u, Batches: x.total, Rows: x.rows, Busy: time.Duration(x.busy)})
	}
	r.MeanRoundRows /= float64(max(1, r.Rounds))
	return r
}
