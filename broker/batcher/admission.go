// SPDX-License-Identifier: Apache-2.0

package batcher

import "time"

// late says whether a request that arrives now could not be answered in time
// any more, by the latency goal or by its own deadline. What it would wait for:
// the batches that run, full batches of all that is queued, and its own.
//
// Only a model with a goal refuses by what batches are expected to take; elsewhere
// a request is refused only if it is hopeless.
//
// What is not known costs nothing; the rest is taken to last a little longer than
// it did, so that what is taken is in time.
func (l *learner) late(now Time, r *Request, queuedRows, expected int) bool {
	if l.settings.LatencyGoal == 0 || !l.shapes[0].known() {
		return false
	}
	if !l.waits.closed {
		l.follow(r)
	}
	l.atTheLimit = false
	goal := r.Arrived + Time(l.settings.LatencyGoal)
	due := min(r.Deadline, goal) - l.handing()
	if queuedRows == 0 && l.busy < l.present() {
		return false // if nothing ran any more, nothing could be learned: the first batch may have been the only slow one
	}
	l.refreshTable()
	most := l.settings.MaxBatchSize
	before, rows := l.packing.put(r.Rows, queuedRows, most)
	l.freeTimes(now, l.occupied)
	if len(l.free) == 0 {
		return false // when a worker comes is not known
	}
	l.occupy(before, l.occupied(l.packing.fullRows(most), len(l.free)-1))
	// Until then others join it.
	start, others := l.free[l.first()], 0
	for _, at := range l.free {
		if at > start {
			others++
		}
	}
	rows += l.joining(now, start, expected)
	end := start + l.hoped(min(most, rows), others)
	if end <= due {
		if l.atTheLimit = r.Deadline >= goal && float64(end-r.Arrived) > nearlyLate*float64(due-r.Arrived); l.atTheLimit {
			l.limitAt = now
		}
		return false
	}
	if r.Deadline >= goal && l.safety > firstSafety && now-l.limitAt > unjudged {
		l.safety = max(firstSafety, l.safety-safetyFalls)
	}
	if r.Deadline > goal {
		l.waits.ended(true)
	}
	return true
}

// joining is how many rows join a batch that starts then. Where clients send when they
// are answered it is not more than those have that could.
func (l *learner) joining(now, start Time, expected int) int {
	if l.rowEvery == 0 {
		return 0
	}
	rows := min(float64(start-now)/l.rowEvery, float64(l.settings.MaxBatchSize))
	if l.waits.closed {
		rows = min(rows, l.rowsEach*float64(expected))
	}
	return int(rows)
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
	// safetyGain is what one that is late adds to the safety; lateAtTheLimit of them may be.
	safetyGain, lateAtTheLimit = 0.001, 0.003
	// At first it is a little, and never none: batches do not always take the same.
	firstSafety, leastSafety, mostSafety = 1.03, 1.02, 1.25
	// Where the safety itself has all refused that would tell whether it is right, each
	// that is refused after that time takes a part of it away.
	unjudged, safetyFalls = Time(time.Second), 0.01
)

// judge learns from one that was taken at the limit, whether it was late: under
// overload nearly all are, and with batches that differ by chance half of them
// would be late if batches were taken to last as long as they do on average.
func (l *learner) judge(late bool) {
	if late {
		l.safety = min(l.safety+safetyGain, mostSafety)
	} else {
		l.safety = max(leastSafety, l.safety-safetyGain*lateAtTheLimit)
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
	return l.hoped(rows, others) + l.handing()
}

// handing is the turnaround, of which most of a goal must be left: if all that has to wait
// is refused, nobody learns that it is shorter again.
func (l *learner) handing() Time { return min(Time(l.turnaround), l.waits.goal/8) }

func (l *learner) present() (n int) {
	for i := range l.workers {
		if l.workers[i].here {
			n++
		}
	}
	return n
}

// refreshTable brings the table of batch times up to date, now and then. With a goal
// the first batches of all tell much: by what one row takes, most requests would be
// refused.
func (l *learner) refreshTable() {
	c := &l.shapes[0].costs
	every := uint32(16)
	if l.waits.goal > 0 {
		every = min(every, 1+c.batches/8)
	}
	if workers := l.present(); !l.table.known || c.batches-l.tableAt >= every || workers != l.tableWorkers {
		l.tableAt, l.tableWorkers, l.tableRows = c.batches, workers, l.settings.MaxBatchSize
		for i := range l.workers {
			if l.workers[i].here {
				l.tableRows = max(l.tableRows, l.workers[i].PadTo)
			}
		}
		l.table.fill(c, l.tableRows, max(0, workers-1))
		l.table.hopes(c, l.tableRows, max(0, workers-1), &l.hopes)
	}
}
