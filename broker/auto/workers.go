// SPDX-License-Identifier: Apache-2.0

package auto

import "github.com/ringbatch/ringbatch/broker/batcher"

// worker is what a worker holds, at index WorkerID of Advisor.workers.
type worker struct {
	batcher.Worker
	attached bool
	freeAt   Time // when it finished last
	batches  []batch
	warm     [sizeClasses]bool // it has run that size
}

// batch is a batch that a worker holds.
type batch struct {
	id         batcher.BatchID
	sent       Time
	rows       int // that the worker sees
	others     int // workers that were busy when it was sent
	shape      int
	isFirst    bool // the worker had not run its size before
	unanswered bool
}

// WorkerReady notes a worker, or its new description.
func (a *Advisor) WorkerReady(w batcher.Worker) {
	a.workers = grown(a.workers, int(w.ID))
	x := &a.workers[w.ID]
	x.Worker, x.attached = w, true
}

// WorkerGone forgets a worker.
func (a *Advisor) WorkerGone(w batcher.WorkerID) {
	if int(w) < len(a.workers) && a.workers[w].attached {
		if len(a.workers[w].batches) > 0 {
			a.busy--
		}
		a.workers[w] = worker{}
	}
}

// BatchSent notes a batch.
func (a *Advisor) BatchSent(now Time, d batcher.Dispatch) {
	if d.Why == batcher.Full {
		if a.fullRows == 0 {
			a.fullRows = float64(d.Rows)
		}
		a.fullRows += (float64(d.Rows) - a.fullRows) / 16
	}
	x := &a.workers[d.Worker]
	others := a.busy
	if len(x.batches) == 0 {
		a.busy++
	} else {
		others--
	}
	class := classOf(d.PadTo)
	x.batches = append(x.batches, batch{
		id: d.Batch, sent: now, rows: d.PadTo, others: others, shape: a.shapeOf(&d.Dims), isFirst: !x.warm[class],
	})
	x.warm[class] = true
}

// BatchUnanswered marks a batch that may not have been computed.
func (a *Advisor) BatchUnanswered(w batcher.WorkerID, id batcher.BatchID) {
	if int(w) >= len(a.workers) {
		return
	}
	for i := range a.workers[w].batches {
		if p := &a.workers[w].batches[i]; p.id == id {
			p.unanswered = true
		}
	}
}

// BatchDone learns what a batch took, from when its worker could begin with it.
func (a *Advisor) BatchDone(w batcher.WorkerID, id batcher.BatchID, _, finished Time) {
	x := &a.workers[w]
	for i := range x.batches {
		p := x.batches[i]
		if p.id != id {
			continue
		}
		a.learnCost(&p, x.began(&p), finished)
		x.freeAt = max(x.freeAt, finished)
		a.lastDone = max(a.lastDone, finished)
		if x.batches = append(x.batches[:i], x.batches[i+1:]...); len(x.batches) == 0 {
			a.busy--
		}
		return
	}
}

// began is when a worker could begin with a batch that is its next.
func (x *worker) began(p *batch) Time {
	if x.Lanes > 1 {
		return p.sent
	}
	return max(p.sent, x.freeAt)
}

// learnCost takes a batch into the costs. One that gave nobody a result and was far too
// quick was given up, and does not count.
func (a *Advisor) learnCost(p *batch, from, to Time) {
	took := float64(to - from)
	s := &a.shapes[p.shape]
	if p.unanswered && took < s.expected(p.rows, p.others)/farOff/farOff {
		return
	}
	s.observe(sample{p.rows, p.others, from, to}, p.isFirst)
	if a.took == 0 {
		a.took, a.quickest = took, took
	}
	a.took += (took - a.took) / 16
	a.quickest = min(took, a.quickest+(took-a.quickest)/64)
}

// lanes is how many batches can run at once.
func (a *Advisor) lanes() (n int) {
	for i := range a.workers {
		if a.workers[i].attached {
			n += max(1, a.workers[i].Lanes)
		}
	}
	return n
}

// HoldUntil holds batches back while another runs, if they go one at a time: but no
// longer than a few batches take, and not for a batch that takes far too long.
func (a *Advisor) HoldUntil(since Time) Time {
	if !a.plan.oneAtATime {
		return -batcher.Never
	}
	until := -batcher.Never
	for i := range a.workers {
		if x := &a.workers[i]; len(x.batches) > 0 {
			p := &x.batches[0]
			until = max(until, x.began(p)+Time(overdue*a.shapes[p.shape].expected(p.rows, p.others)))
		}
	}
	return min(until, since+Time(overdue*a.took))
}
