// SPDX-License-Identifier: Apache-2.0

package batcher

import "math"

// late says whether a request that arrives now could not be answered in time
// any more, by the latency goal or by its own deadline. What it would wait for:
// the batches that run, full batches of all that is queued, and its own.
//
// Only a model with a goal refuses early. Elsewhere a request with a short
// deadline is tried, and ends as Expired: batch times are an estimate, and who
// set no goal did not ask to have requests turned away by one.
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
	full := l.expected(most)
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
				at = max(at, start) + l.expected(p.rows)
			}
			l.free = append(l.free, max(at, now))
		}
		if len(l.free) >= maxFree {
			break
		}
	}
	if len(l.free) == 0 {
		return false // when a worker comes is not known
	}
	before := queuedRows / most
	if rounds := before / len(l.free); rounds > 0 { // every worker does as many
		for i := range l.free {
			l.free[i] += Time(rounds) * full
		}
		before %= len(l.free)
	}
	for range before {
		l.free[l.first()] += full
	}
	// Until then others join it.
	start := l.free[l.first()]
	rows := queuedRows%most + r.Rows
	if l.rowEvery > 0 {
		rows += int(min(float64(start-now)/l.rowEvery, float64(most)))
	}
	return start+l.expected(min(most, rows)) > due
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
	}
}
