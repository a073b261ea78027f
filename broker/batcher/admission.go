// SPDX-License-Identifier: Apache-2.0

package batcher

import (
	"math"
	"slices"
	"time"
)

// late says whether a request that arrives now could not be answered in time
// any more, by the latency goal or by its own deadline. What it would wait for:
// the batches that run, full batches of all that is queued, and its own. With several
// levels what goes before it is the requests of its level and of more urgent ones (ahead).
//
// What is not known costs nothing; the rest is taken to last a little longer than
// it did, so that what is taken is in time.
func (l *learner) late(now Time, r *Request, queuedRows, ahead, expected int) bool {
	l.limit = 0
	goal := l.goalOf(r.Arrived)
	due := min(r.Deadline, goal)
	if due == Never || !l.tells() {
		return false
	}
	l.limit = Never
	if !l.waits.closed {
		l.follow(r)
	}
	held := l.apart && queuedRows+r.Rows <= l.settings.MaxBatchSize // what is queued, and goes with it
	if (queuedRows == 0 || held) && l.busy < l.present() {
		// By the goal, or if nothing is known, it is tried: if nothing ran any more, nothing
		// could be learned, and the first batch may have been the only slow one.
		f := l.floorOf(&r.Dims)
		return f != nil && f.exceeds(now, r)
	}
	if len(l.settings.Levels) > 1 && l.waits.goal == 0 {
		queuedRows = min(queuedRows, int(float64(ahead)*l.rowsEach))
	}
	l.refreshTable(true)
	l.hand = l.handing(due - r.Arrived)
	due -= l.hand
	most := l.settings.MaxBatchSize
	before, rows := l.packing.put(r.Rows, queuedRows, most)
	// Most have time enough, and are not looked at any closer.
	if Time(before+3)*l.longestOccupied() < Time(nearlyLate*float64(due-now)) {
		return false
	}
	l.freeTimes(now)
	if len(l.free) == 0 {
		return false // when a worker comes is not known
	}
	l.occupy(before, l.occupied(l.padded(l.packing.fullRows(most)), len(l.free)-1))
	// Until then others join it.
	start, others := l.free[l.first()], 0
	for _, at := range l.free {
		if at > start {
			others++
		}
	}
	rows += l.joining(now, start, expected)
	end := start + l.hopedOf(&r.Dims, l.padded(min(most, rows)), others)
	if end <= due {
		if float64(end-r.Arrived) > nearlyLate*float64(due-r.Arrived) {
			l.limit, l.limitAt = due, now
		}
		return false
	}
	if l.safety > firstSafety && now-l.limitAt > unjudged {
		l.safety = max(firstSafety, l.safety-safetyFalls)
	}
	if r.Deadline > goal {
		l.waits.ended(true)
	}
	l.wasRefused(r)
	return true
}

// joining is how many rows join a batch that starts then. Where clients send when they
// are answered it is not more than those have that could.
func (l *learner) joining(now, start Time, expected int) int {
	if l.rowEvery == 0 {
		return 0
	}
	rows := min(float64(start-now)/l.rowEvery, float64(l.settings.MaxBatchSize))
	could := l.rowsEach * float64(expected)
	switch {
	case l.waits.closed:
		rows = min(rows, could)
	case !l.auto:
		// Nobody looks whether they do. If those that are refused try again at once, as many
		// rows seem to come as they try, and more are refused for it: not more than could
		// come and those that run, whose clients may send again before then.
		rows = min(rows, could+float64(l.runningRows()))
	}
	return int(rows)
}

// padded is the rows that a worker sees of a batch, at least.
func (l *learner) padded(rows int) int {
	least := math.MaxInt
	for i := range l.workers {
		if x := &l.workers[i]; x.here {
			least = min(least, padTo(&l.settings, &x.Worker, rows))
		}
	}
	if least == math.MaxInt {
		return rows
	}
	return least
}

// runningRows is the rows of the batches that workers have.
func (l *learner) runningRows() (n int) {
	for i := range l.workers {
		for j := range l.workers[i].batches {
			n += l.workers[i].batches[j].rows
		}
	}
	return n
}

// follow learns how fast rows come: those that are refused, too, since others like
// them are taken in their place; but not where clients send when they are answered,
// and try again.
func (l *learner) follow(r *Request) {
	if gap := float64(r.Arrived-l.rowAt) / float64(r.Rows); l.rowAt > 0 && gap >= 0 {
		l.rowEvery += (min(gap, float64(time.Second)) - l.rowEvery) / 32
		l.rowsEach += (float64(r.Rows) - l.rowsEach) / 32
	}
	l.rowAt = max(l.rowAt, r.Arrived)
}

const (
	// nearlyLate is the share of its time from which on a request was taken at the limit.
	nearlyLate = 0.9
	// safetyGain is what one that was taken at the limit and is late adds to the safety;
	// that share of all that are taken may be.
	safetyGain, lateShare = 0.001, 0.003
	// At first it is a little, and never none: batches do not always take the same.
	firstSafety, leastSafety, mostSafety = 1.03, 1.02, 1.25
	// Where the safety itself has all refused that would tell whether it is right, each
	// that is refused after that time takes a part of it away.
	unjudged, safetyFalls = Time(time.Second), 0.01
)

// ended learns from a request that had to be answered by some time, when it was, or expired;
// Never if that tells nothing.
func (l *learner) ended(id RequestID, at Time) {
	if int(id) >= len(l.limits) || l.limits[id] == 0 {
		return
	}
	if at != Never {
		l.judge(at > l.limits[id])
	}
	l.limits[id] = 0
}

// judge learns whether one that was taken at the limit was late: under overload nearly all
// are at the limit, and with batches that differ by chance half of them would be late if
// batches were taken to last as long as they do on average. Those that were taken with time
// to spare count as in time.
func (l *learner) judge(late bool) {
	if late {
		l.safety = min(l.safety+safetyGain, mostSafety)
	} else {
		l.safety = max(leastSafety, l.safety-safetyGain*lateShare)
	}
}

// maxFree bounds the work of late.
const maxFree = 64

// first is the worker that is free first.
func (l *learner) first() int {
	first := 0
	for i, at := range l.free {
		if at < l.free[first] {
			first = i
		}
	}
	return first
}

// expected is what a batch is expected to take, with all workers busy.
func (l *learner) expected(rows int) Time {
	return l.table.of(min(rows, l.tableRows), max(0, l.present()-1)) * 103 / 100
}

// hoped is the same with so many others busy, but less for sizes that were not seen lately.
func (l *learner) hoped(rows, others int) Time {
	others = max(0, min(others, maxOthers, l.tableWorkers-1))
	return Time(l.safety * float64(l.hopes[others][sizeClass(min(rows, l.tableRows))]))
}

// occupied is how long a worker has such a batch, until it can be given the next.
func (l *learner) occupied(rows, others int) Time {
	return l.hoped(rows, others) + l.hand
}

// longestOccupied is that of the batch that takes longest.
func (l *learner) longestOccupied() Time {
	return Time(l.safety*float64(l.longestHope)) + l.hand
}

// patience is how long a request may wait for others to batch with, if it is to be answered
// in time: half of the time to its own deadline, and not so long that the batch of all that
// is queued and joins would be late. The goal counts if no wait was found that keeps it.
func (l *learner) patience(arrived, deadline Time, queuedRows, expected int) Time {
	due := deadline
	if l.waits.strained {
		due = min(due, l.goalOf(arrived))
	}
	if l.patient = Never; due == Never {
		return Never
	}
	budget := due - arrived
	l.patient = budget
	if deadline != Never {
		l.patient = min(budget, (deadline-arrived)/2)
	}
	if l.tells() {
		l.refreshTable(true)
		rows := queuedRows + l.joining(0, min(l.wait, l.patient), expected)
		batch := l.hoped(l.padded(min(rows, l.settings.MaxBatchSize)), l.present()-1)
		l.patient = max(0, min(l.patient, budget-l.handing(budget)-batch))
	}
	return l.patient
}

// tells says whether what was seen tells what batches take. Only a goal asks to be kept
// from the first batch on, which may have been slow.
func (l *learner) tells() bool {
	return l.shapes[0].batches >= youngPoint || l.waits.goal > 0 && l.shapes[0].known()
}

// goalOf is when a request must be answered by the goal.
func (l *learner) goalOf(arrived Time) Time {
	if l.waits.goal == 0 {
		return Never
	}
	return arrived + l.waits.goal
}

// handing is the turnaround, which leaves most of the time that a request has: if all that
// has to wait is refused, nobody learns that it is shorter again.
func (l *learner) handing(budget Time) Time { return min(Time(l.turnaround), budget/8) }

func (l *learner) present() (n int) {
	for i := range l.workers {
		if l.workers[i].here {
			n++
		}
	}
	return n
}

// After manyBatches the table is made anew no more often than refreshEach: that takes as
// long as some hundred requests do, and quick batches do not change what they take with
// each sixteenth.
const (
	manyBatches = 128
	refreshEach = Time(10 * time.Millisecond)
)

// refreshTable brings the table of batch times up to date, now and then. Where requests
// are refused by it the first batches of all tell much: by what one row takes, most would
// be.
func (l *learner) refreshTable(refuses bool) {
	c := &l.shapes[0].costs
	every := uint32(16)
	if refuses {
		every = min(every, 1+c.batches/8)
	}
	due := c.batches-l.tableAt >= every && (c.batches < manyBatches || l.latestEnd-l.tableTime >= refreshEach)
	if workers := l.present(); !l.table.known || due || workers != l.tableWorkers {
		l.tableAt, l.tableTime, l.tableWorkers, l.tableRows = c.batches, l.latestEnd, workers, l.settings.MaxBatchSize
		for i := range l.workers {
			if l.workers[i].here {
				l.tableRows = max(l.tableRows, l.workers[i].PadTo)
			}
		}
		l.table.fill(c, l.tableRows, max(0, workers-1))
		l.table.hopes(c, l.tableRows, max(0, workers-1), &l.hopes)
		l.longestHope = 0
		for others := range min(max(1, workers), maxOthers+1) {
			l.longestHope = max(l.longestHope, slices.Max(l.hopes[others][:sizeClass(l.tableRows)+1]))
			for i := range l.shapes[1:] { // one may take far longer than what all of them take together tells
				l.longestHope = max(l.longestHope, Time(l.shapes[1+i].expected(l.tableRows, others)))
			}
		}
	}
}

// freeTimes is when each lane of the workers has done what it holds: in l.free.
func (l *learner) freeTimes(now Time) {
	l.free = l.free[:0]
	for i := range l.workers {
		x := &l.workers[i]
		if !x.here {
			continue
		}
		lanes := max(1, x.Lanes)
		for j := range lanes {
			at := Time(math.MinInt64)
			for k := j; k < len(x.batches); k += lanes { // what this lane has, one after the other
				p := &x.batches[k]
				start := p.dispatched
				if lanes == 1 {
					start = max(start, x.freeAt)
				}
				at = max(at, start) + l.occupiedBy(p)
			}
			l.free = append(l.free, max(at, now))
		}
		if len(l.free) >= maxFree {
			break
		}
	}
}

// occupy gives so many batches of the same time to the lane that is free first.
func (l *learner) occupy(batches int, each Time) {
	if rounds := batches / len(l.free); rounds > 0 { // every worker does as many
		for i := range l.free {
			l.free[i] += Time(rounds) * each
		}
		batches %= len(l.free)
	}
	for range batches {
		l.free[l.first()] += each
	}
}
