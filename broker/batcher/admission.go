// SPDX-License-Identifier: Apache-2.0

package batcher

// late says whether a request that arrives now could not be answered in time
// any more, by the latency goal or by its own deadline. What it would wait for:
// the batches that run, full batches of all that is queued, and its own.
//
// Only a model with a goal refuses by what batches are expected to take; elsewhere
// a request is refused only if it is hopeless.
//
// What is not known costs nothing; the rest is taken to last a little longer than
// it did, so that what is taken is in time.
func (l *learner) late(now Time, r *Request, queuedRows int) bool {
	if l.settings.LatencyGoal == 0 || !l.shapes[0].known() {
		return false
	}
	due := min(r.Deadline, r.Arrived+Time(l.settings.LatencyGoal))
	if queuedRows == 0 && l.busy < l.present() {
		return false // if nothing ran any more, nothing could be learned: the first batch may have been the only slow one
	}
	l.refreshTable()
	most := l.settings.MaxBatchSize
	full := l.hoped(most)
	l.freeTimes(now, l.hoped)
	if len(l.free) == 0 {
		return false // when a worker comes is not known
	}
	l.occupy(queuedRows/most, full)
	// Until then others join it.
	start := l.free[l.first()]
	rows := queuedRows%most + r.Rows
	if l.rowEvery > 0 {
		rows += int(min(float64(start-now)/l.rowEvery, float64(most)))
	}
	return start+l.hoped(min(most, rows)) > due
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

// hoped is the same, but less for sizes that were not seen lately.
func (l *learner) hoped(rows int) Time {
	return l.hopes[sizeClass(min(rows, l.tableRows))] * 103 / 100
}

func (l *learner) present() (n int) {
	for i := range l.workers {
		if l.workers[i].here {
			n++
		}
	}
	return n
}

// refreshTable brings the table of batch times up to date, now and then.
func (l *learner) refreshTable() {
	c := &l.shapes[0].costs
	if workers := l.present(); !l.table.known || c.batches-l.tableAt >= 16 || workers != l.tableWorkers {
		l.tableAt, l.tableWorkers, l.tableRows = c.batches, workers, l.settings.MaxBatchSize
		for i := range l.workers {
			if l.workers[i].here {
				l.tableRows = max(l.tableRows, l.workers[i].PadTo)
			}
		}
		l.table.fill(c, l.tableRows, max(0, workers-1))
		l.table.lately(c, l.tableRows, max(0, workers-1), &l.hopes)
	}
}
