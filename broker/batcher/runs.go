// SPDX-License-Identifier: Apache-2.0

package batcher

import "math"

// workerPace is what a worker holds.
type workerPace struct {
	Worker
	here    bool
	freeAt  Time // when it finished last
	doneAt  uint // decisions then
	batches []pacedBatch
	counted int       // for which run it was counted last, by learner.ran
	sizes   []sizeSet // by shape: those that it was given
}

type pacedBatch struct {
	id         BatchID
	dispatched Time
	rows       int // that the worker sees
	others     int // workers that had a batch when this one was dispatched; when it is done, those that were busy when it began
	shape      int
	first      bool // of its size in its worker: it may be cold
	unanswered bool // nobody has a result of it
}

// pacedRun is when a worker was busy.
type pacedRun struct {
	worker   WorkerID
	from, to Time
}

func (l *learner) workerReady(w Worker) {
	l.workers = grown(l.workers, int(w.ID))
	x := &l.workers[w.ID]
	x.Worker, x.here = w, true
}

func (l *learner) workerGone(w WorkerID) {
	if int(w) < len(l.workers) && l.workers[w].here {
		x := &l.workers[w]
		if len(x.batches) > 0 {
			l.busy--
		}
		*x = workerPace{batches: x.batches[:0], sizes: x.sizes[:0]}
	}
}

func (l *learner) dispatched(d *Dispatch, now Time) {
	l.packing.dispatched(d)
	x := &l.workers[d.Worker]
	others := l.busy
	if len(x.batches) == 0 {
		l.busy++
		if x.freeAt > 0 && x.doneAt == l.decisions && l.cameBefore(d, x.freeAt) { // it was waited for
			l.turnaround += (float64(max(0, min(now-x.freeAt, maxTurnaround))) - l.turnaround) / 16
		} else {
			l.turnaround -= l.turnaround / 64
		}
	} else {
		others--
	}
	shape := l.shapeOf(&d.Dims)
	x.batches = append(x.batches, pacedBatch{id: d.Batch, dispatched: now, rows: d.PadTo, others: others, shape: shape, first: x.isNew(shape, d.PadTo)})
}

// cameBefore says whether the first request of a batch was there at a time. A broker
// with nothing to do looks at what workers have done only when the next request comes.
func (l *learner) cameBefore(d *Dispatch, at Time) bool {
	id := int(d.Requests[0])
	return id < len(l.recordOf) && l.count-l.recordOf[id] <= maxRecords && l.records[l.recordOf[id]%maxRecords].arrived <= at
}

// isNew says whether a worker has not run a size of a shape yet, and notes that it does.
func (x *workerPace) isNew(shape, rows int) bool {
	for len(x.sizes) <= shape {
		x.sizes = append(x.sizes, sizeSet{})
	}
	sizes, class := &x.sizes[shape], sizeClass(rows)
	was := sizes.has(class)
	sizes.add(class)
	return !was
}

// unanswered notes that a batch may not have been computed.
func (l *learner) unanswered(w WorkerID, id BatchID) {
	if int(w) >= len(l.workers) {
		return
	}
	for i := range l.workers[w].batches {
		if p := &l.workers[w].batches[i]; p.id == id {
			p.unanswered = true
		}
	}
}

// learnRun learns what a batch took. One that nobody has a result of and that was
// far too quick was given up, not computed, and tells nothing; one that was quick
// may have been, and does not tell what others take at least.
func (l *learner) learnRun(p *pacedBatch, from, finished Time) {
	took := finished - from
	quick := func(by float64) bool { return p.unanswered && float64(took) < l.expectedOf(p)*math.Exp(-by) }
	if quick(veryFarOff) {
		return
	}
	computed := !quick(farOff)
	if l.took == 0 {
		l.took = float64(took)
	}
	l.took += (float64(took) - l.took) / 16
	if computed {
		if l.least += (float64(took) - l.least) / 64; float64(took) < l.least || l.least == 0 {
			l.least = float64(took)
		}
		l.floor.observe(p.rows, took, finished)
		if p.shape > 0 {
			l.shapes[p.shape].floor.observe(p.rows, took, finished)
		}
	}
	l.shapes[0].observe(p.rows, p.others, from, took, p.first)
	if p.shape > 0 {
		l.shapes[p.shape].observe(p.rows, p.others, from, took, p.first)
	}
}

// expectedOf is about what a batch takes, by its shape if that is known.
func (l *learner) expectedOf(p *pacedBatch) float64 {
	if c := &l.shapes[p.shape]; c.known() {
		return c.expected(p.rows, p.others)
	}
	return l.shapes[0].expected(p.rows, p.others)
}

// othersAt is how many workers other than w were busy at a time, up to maxOthers. It is
// for the run that is noted next.
func (l *learner) othersAt(w WorkerID, at Time) (n int) {
	next := l.ran + 1
	count := func(other WorkerID) {
		if x := &l.workers[other]; other != w && x.counted != next { // several batches at once are one worker
			x.counted = next
			n++
		}
	}
	for i := range l.workers {
		if x := &l.workers[i]; len(x.batches) > 0 && x.began(&x.batches[0]) <= at {
			count(WorkerID(i))
		}
	}
	// Runs are about in the order of their ends: as they were seen.
	for i, before := 1, 0; i <= min(l.ran, maxRuns) && before <= len(l.workers) && n < maxOthers; i++ {
		switch run := &l.runs[(l.ran-i)%maxRuns]; {
		case run.to <= at:
			before++
		case run.from <= at:
			count(run.worker)
		}
	}
	return min(n, maxOthers)
}

// began is when a worker could begin with a batch that is its next.
func (x *workerPace) began(p *pacedBatch) Time {
	if x.Lanes > 1 {
		return p.dispatched
	}
	return max(p.dispatched, x.freeAt)
}

// done learns what a batch took: from when the worker could begin with it. What counts
// is who was busy when it began: at its dispatch some may have been done already, and
// not have been seen to be.
func (l *learner) done(w WorkerID, id BatchID, started, finished Time) {
	x := &l.workers[w]
	for i := range x.batches {
		p := x.batches[i]
		if p.id != id {
			continue
		}
		from := x.began(&p)
		others := l.othersAt(w, max(from, min(started, finished)))
		if from == p.dispatched { // of those that were given one at the same time, some came later
			others = min(others, p.others)
		}
		p.others = others
		l.runs = grown(l.runs, maxRuns-1)
		l.runs[l.ran%maxRuns] = pacedRun{w, from, finished}
		l.ran++
		l.latestEnd = max(l.latestEnd, finished)
		l.learnRun(&p, from, finished)
		x.freeAt, x.doneAt = max(x.freeAt, finished), l.decisions
		x.batches = append(x.batches[:i], x.batches[i+1:]...)
		if len(x.batches) == 0 {
			l.busy--
		}
		return
	}
}

// shapeOf is knownShape, but a new one gets a place while there are any.
func (l *learner) shapeOf(d *Dims) int {
	if *d == (Dims{}) {
		return 0
	}
	if known := l.knownShape(d); known > 0 {
		return known
	}
	l.shapes = append(l.shapes, shapeCosts{dims: *d})
	return len(l.shapes) - 1
}
