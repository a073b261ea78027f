// SPDX-License-Identifier: Apache-2.0

package auto

import (
	"math"
	"slices"

	"github.com/ringbatch/ringbatch/broker/batcher"
)

// worker is the state of a worker, at index WorkerID of Advisor.workers.
type worker struct {
	batcher.Worker      // has no Lanes if it is not there
	freeAt         Time // when it finished last
	batches        []batch
	warm           [sizeClasses]bool // it has run that size
}

// batch is a batch that a worker holds.
type batch struct {
	id         batcher.BatchID
	sent       Time
	rows       int // that the worker sees; see sizeOfBatch
	others     int // workers that were busy when it was sent
	shape      int
	isFirst    bool // the worker had not run its size before
	unanswered bool
}

// WorkerReady notes a worker, or its new description.
func (a *Advisor) WorkerReady(w batcher.Worker) {
	a.workers = grown(a.workers, int(w.ID))
	a.workers[w.ID].Worker = w
}

// WorkerGone forgets a worker.
func (a *Advisor) WorkerGone(w batcher.WorkerID) {
	if len(a.workers[w].batches) > 0 {
		a.busy--
	}
	a.workers[w] = worker{}
}

// BatchSent notes a batch.
func (a *Advisor) BatchSent(now Time, d batcher.Dispatch) {
	x, others, size := &a.workers[d.Worker], a.busy, sizeOfBatch(&a.settings, d.PadTo, d.Cost)
	if len(x.batches) == 0 {
		a.busy++
	} else {
		others--
	}
	x.batches = append(x.batches, batch{
		id: d.Batch, sent: now, rows: size, others: others, shape: a.shapeOf(&d.Dims), isFirst: !x.warm[classOf(size)],
	})
	x.warm[classOf(size)] = true
}

// BatchUnanswered marks a batch that may not have been computed.
func (a *Advisor) BatchUnanswered(w batcher.WorkerID, id batcher.BatchID) {
	if i := a.workers[w].find(id); i >= 0 {
		a.workers[w].batches[i].unanswered = true
	}
}

// BatchDone learns the time of a batch, from when its worker could begin with it. A batch without
// results that was far too quick was given up, and does not count.
func (a *Advisor) BatchDone(w batcher.WorkerID, id batcher.BatchID, _, finished Time) {
	x := &a.workers[w]
	i := x.find(id)
	p := x.batches[i]
	from := x.began(&p)
	x.freeAt, a.lastDone = max(x.freeAt, finished), max(a.lastDone, finished)
	if x.batches = slices.Delete(x.batches, i, i+1); len(x.batches) == 0 {
		a.busy--
	}
	s, took := &a.shapes[p.shape], float64(finished-from)
	if p.unanswered && took < s.expected(p.rows, p.others)/farOff/farOff {
		return
	}
	if s.observe(sample{p.rows, p.others, from, finished}, p.isFirst) {
		a.changes++
	}
	a.batches++
	if a.took == 0 {
		a.took = took
	}
	a.took += (took - a.took) / 16
}

func (x *worker) find(id batcher.BatchID) int {
	return slices.IndexFunc(x.batches, func(p batch) bool { return p.id == id })
}

// began is the earliest time at which the worker could start this batch.
func (x *worker) began(p *batch) Time {
	if x.Lanes > 1 {
		return p.sent
	}
	return max(p.sent, x.freeAt)
}

// lanes is how many batches can run at once.
func (a *Advisor) lanes() (n int) {
	for i := range a.workers {
		n += a.workers[i].Lanes
	}
	return n
}

// HoldUntil holds batches back while another runs that is not overdue, but not for long.
func (a *Advisor) HoldUntil(since Time) Time {
	until := -batcher.Never
	for i := range a.workers {
		if x := &a.workers[i]; a.plan.oneAtATime && len(x.batches) > 0 {
			p := &x.batches[0]
			until = max(until, x.began(p)+Time(overdue*a.shapes[p.shape].expected(p.rows, p.others)))
		}
	}
	return min(until, since+Time(overdue*a.took))
}

// IsLate says whether a request would miss its deadline or the latency goal: if the running batches,
// full batches of all rows before it, and its own batch are expected to end too late, with the
// margin of its level. If the queue is empty and a worker idle, it is late only if it has far less
// time than its batch takes. If no batch ran lately, or too few ever, it is tried. In the lanes of a worker rows differ in their
// rounds: such a request is late only if it would begin too late.
func (a *Advisor) IsLate(now Time, r batcher.Request, q batcher.Queue) bool {
	a.clients = q.Clients
	r.Rows = min(sizeOfBatch(&a.settings, r.Rows, r.Rows*r.Cost), a.settings.MaxBatchSize)
	q.Rows = sizeOfBatch(&a.settings, q.Rows, q.Cost)
	a.gap += (min(float64(max(0, r.Arrived-a.lastArrival)), float64(remembered)) - a.gap) / 128
	a.lastArrival = max(a.lastArrival, r.Arrived)
	latest, hop := a.latestEnd(now, &r)
	s := &a.shapes[a.shapeOf(&r.Dims)]
	if latest == batcher.Never || s.batches == 0 || a.batches < young || a.busy == 0 && now-a.lastDone > remembered {
		return false
	}
	lanes := a.freeLanes(now, hop)
	if len(lanes) == 0 {
		return false // when a worker comes is unknown
	}
	others, differ := min(a.busy, len(lanes)-1), slices.ContainsFunc(a.workers, func(x worker) bool { return x.Lanes > 1 })
	if lanes[0] == now && q.Rows == 0 {
		return !differ && s.batches >= young && float64(r.Deadline-now) < s.expected(r.Rows, others)/farOff
	}
	// A full batch has no room for the next request, which has some rows.
	each := float64(q.Rows+r.Rows) / float64(q.Requests+1)
	full := max(1, int(each), a.settings.MaxBatchSize-int(2*(each-1)))
	before := (q.Rows+r.Rows-1)/full + (min(max(0, len(a.shapes)-2), q.Requests)+1)/2 // other shapes make batches that are not full
	start := lanes[before%len(lanes)] + Time(before/len(lanes))*(Time(s.expected(full, len(lanes)-1))+hop)
	joining := float64(start-now) / max(1, a.gap)
	joining += math.Sqrt(joining) // by chance more come than on average
	rows := float64(max(0, q.Rows-before*full)+r.Rows) + joining*each
	end := start
	if !differ {
		end += Time(s.expected(int(min(rows, float64(a.settings.MaxBatchSize))), others))
	}
	return now+Time(a.margins[r.Level]*float64(end-now)) > latest
}

// latestEnd is when the batch of a request must end for its deadline and the latency goal; Never if it
// has neither. hop is the time of the way here, and of the way back.
func (a *Advisor) latestEnd(now Time, r *batcher.Request) (latest, hop Time) {
	due := r.Deadline
	if a.settings.LatencyGoal > 0 {
		due = min(due, r.Arrived+Time(a.settings.LatencyGoal))
	}
	if due == batcher.Never {
		return due, 0
	}
	hop = min(now-r.Arrived, (due-r.Arrived)/8)
	return due - hop, hop
}

// freeLanes is when each lane of the workers has done its batches, in order.
func (a *Advisor) freeLanes(now, hop Time) []Time {
	free := a.free[:0]
	for i := range a.workers {
		x := &a.workers[i]
		for lane := range x.Lanes {
			at := -batcher.Never
			for k := lane; k < len(x.batches); k += x.Lanes {
				p := &x.batches[k]
				at = max(at, x.began(p)) + Time(a.shapes[p.shape].expected(p.rows, p.others)) + hop
			}
			free = append(free, max(at, now))
		}
	}
	slices.Sort(free)
	a.free = free
	return free
}
