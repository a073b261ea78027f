// SPDX-License-Identifier: Apache-2.0

package auto

import (
	"slices"
	"time"

	"github.com/ringbatch/ringbatch/broker/batcher"
)

// arrivals is how fast rows come.
type arrivals struct {
	last  Time    // arrival
	each  float64 // nanoseconds between two rows, lately; 0: unknown
	lanes []Time  // scratch of startOf
}

func (x *arrivals) note(r *batcher.Request) {
	if gap := float64(r.Arrived-x.last) / float64(r.Rows); x.last > 0 && gap >= 0 {
		x.each += (min(gap, float64(time.Second)) - x.each) / 32
	}
	x.last = max(x.last, r.Arrived)
}

// IsLate says whether a request would miss its deadline or the latency goal: if the
// running batches, full batches of all rows before it, and its own batch are expected
// to end too late. A request that finds an idle worker is refused only if it has far less
// time than its batch takes; and it is tried if no batch has run for a while.
func (a *Advisor) IsLate(now Time, r batcher.Request, q batcher.Queue) bool {
	goal := batcher.Never
	if a.settings.LatencyGoal > 0 {
		goal = r.Arrived + Time(a.settings.LatencyGoal)
	}
	due := min(r.Deadline, goal)
	if due == batcher.Never {
		return false
	}
	a.arrivals.note(&r)
	s := &a.shapes[a.shapeOf(&r.Dims)]
	if s.batches == 0 || a.busy == 0 && now-a.lastDone > remembered {
		return false
	}
	hop := min(now-r.Arrived, (due-r.Arrived)/8) // the way back takes as long as the way here
	due -= hop
	start, others, rows := a.startOf(now, s, r.Rows, q, hop)
	if start == now && q.Rows+r.Rows <= a.settings.MaxBatchSize {
		return r.Deadline != batcher.Never && s.batches >= young && float64(r.Deadline-now) < float64(a.expected(s, r.Rows, others))/farOff
	}
	end := start + a.expected(s, rows, others)
	return now+Time(margin*float64(end-now)) > due
}

// startOf is when the batch of a request with so many rows would start, beside how many
// busy workers, and with how many rows in all. now, if a worker is idle.
func (a *Advisor) startOf(now Time, s *shape, own int, q batcher.Queue, hop Time) (start Time, others, rows int) {
	full := a.settings.MaxBatchSize
	if a.fullRows > 0 {
		full = min(full, max(1, int(a.fullRows+0.5)))
	}
	lanes := a.freeLanes(now, hop)
	if len(lanes) == 0 {
		return now, 0, own // when a worker comes is unknown
	}
	before := (q.Rows + own - 1) / full
	rest := max(0, q.Rows-before*full)
	start = lanes[before%len(lanes)] + Time(before/len(lanes))*(a.expected(s, full, len(lanes)-1)+hop)
	for _, at := range lanes {
		if at > start {
			others++
		}
	}
	if before > 0 {
		others = len(lanes) - 1
	}
	joining := 0
	if a.arrivals.each > 0 {
		joining = int(min(float64(start-now)/a.arrivals.each, float64(full)))
	}
	if a.evaluation.closed {
		joining = min(joining, q.Joinable)
	}
	return start, others, min(full, rest+own+joining)
}

// freeLanes is when each lane of the workers has done what it holds, in order.
func (a *Advisor) freeLanes(now, hop Time) []Time {
	lanes := a.arrivals.lanes[:0]
	for i := range a.workers {
		x := &a.workers[i]
		if !x.attached {
			continue
		}
		n := max(1, x.Lanes)
		for lane := range n {
			at := -batcher.Never
			for k := lane; k < len(x.batches); k += n {
				p := &x.batches[k]
				at = max(at, x.began(p)) + a.expected(&a.shapes[p.shape], p.rows, p.others) + hop
			}
			lanes = append(lanes, max(at, now))
		}
	}
	slices.Sort(lanes)
	a.arrivals.lanes = lanes
	return lanes
}

// expected is what a batch takes, by the complete table of its shape.
func (a *Advisor) expected(s *shape, rows, others int) Time {
	if s.batches == 0 {
		return 0
	}
	if !s.table.known || s.batches-s.tabled >= min(16, 1+s.batches/8) {
		s.table.fill(&s.costs, a.mostRows(), maxOthers)
		s.tabled = s.batches
	}
	return s.table.of(min(rows, a.mostRows()), others)
}

// mostRows is the most rows that a worker may see.
func (a *Advisor) mostRows() int {
	most := a.settings.MaxBatchSize
	for i := range a.workers {
		if a.workers[i].attached {
			most = max(most, a.workers[i].PadTo)
		}
	}
	return most
}
