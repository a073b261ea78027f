// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"time"

	"github.com/ringbatch/ringbatch/admin/stats"
	"github.com/ringbatch/ringbatch/internal/histogram"
	"github.com/ringbatch/ringbatch/status"
)

// keptSeconds is a power of two that holds the longest span, the present
// second, and one to spare.
const keptSeconds = 64

// seconds is what happened in each of the last seconds of a stage. Requests
// cost it nothing: a second is the difference of the running counts at its two
// ends, taken by the first event after it (roll). An idle stage has no cells
// to clear: a cell that is of another second counts as empty.
type seconds struct {
	present int64 // the second, on the loop's clock, that base is the beginning of
	first   int64 // the stage's first one
	base    counted
	cells   [keptSeconds]second
}

// counted is the part of the running counts that spans need.
type counted struct {
	requests, ended, ok, rows, batches uint64
	total                              histogram.Histogram
}

type second struct {
	number                             int64
	requests, ended, ok, rows, batches uint64
	computed                           int64 // ns that workers computed in it
	present                            int   // workers that were there at its end
	total                              []histogram.Delta
}

func (s *seconds) cellOf(number int64) *second {
	c := &s.cells[number%keptSeconds]
	if c.number != number {
		*c = second{number: number, total: c.total[:0]}
	}
	return c
}

// rollSecond ends the present second if it is over. What happens at now must be
// counted after it.
func (s *stageStats) rollSecond(now int64, workers int) {
	at := now / int64(time.Second)
	if at == s.seconds.present {
		return
	}
	if s.seconds.first == 0 {
		s.seconds.first = at
	} else {
		s.endSecond(s.seconds.cellOf(s.seconds.present), workers)
	}
	b := &s.seconds.base
	b.requests, b.ended, b.ok, b.rows, b.batches, b.total = s.requests, s.allEnded(), s.byStatus[status.OK], s.rows, s.batches, s.total
	s.seconds.present = at
}

// endSecond writes what was counted since base.
func (s *stageStats) endSecond(c *second, workers int) {
	b := &s.seconds.base
	c.requests, c.rows, c.batches = s.requests-b.requests, s.rows-b.rows, s.batches-b.batches
	c.ended, c.ok = s.allEnded()-b.ended, s.byStatus[status.OK]-b.ok
	c.present = workers
	if c.ended > 0 {
		c.total = s.total.Since(&b.total, c.total[:0])
	}
}

func (s *stageStats) allEnded() (n uint64) {
	for _, k := range &s.byStatus {
		n += k
	}
	return n
}

// spreadComputed spreads a worker's time over the seconds that it took.
func (s *seconds) spreadComputed(started, finished int64) {
	for oldest := s.present - keptSeconds + 1; started < finished; {
		number := started / int64(time.Second)
		end := min(finished, (number+1)*int64(time.Second))
		if number >= oldest {
			s.cellOf(number).computed += end - started
		}
		started = end
	}
}

// spanLengths are the spans that statistics tell of, in seconds.
var spanLengths = []int{1, 10, 60}

// lastSeconds sums up the last whole seconds before now. workers is how many there
// are now; seconds in which nothing happened had as many.
func (s *seconds) lastSeconds(now int64, workers int) []stats.Window {
	last := now/int64(time.Second) - 1
	list := make([]stats.Window, 0, len(spanLengths))
	for _, length := range spanLengths {
		var sum second
		var h histogram.Histogram
		n, there := 0, 0
		for number := last; number > last-int64(length) && number >= s.first && s.first > 0; number-- {
			n++
			c := &s.cells[number%keptSeconds]
			if c.number != number {
				there += workers
				continue
			}
			sum.requests += c.requests
			sum.ended += c.ended
			sum.ok += c.ok
			sum.rows += c.rows
			sum.batches += c.batches
			sum.computed += c.computed
			there += max(c.present, workers)
			h.Grow(c.total)
		}
		w := stats.Window{
			Seconds: length, MeasuredS: n, Ended: sum.ended,
			Latency: stats.WindowLatency{P50: ms(h.Quantile(0.5)), P99: ms(h.Quantile(0.99))},
		}
		if n > 0 {
			per := 1 / float64(n)
			w.RequestsPerS, w.RowsPerS, w.BatchesPerS = float64(sum.requests)*per, float64(sum.rows)*per, float64(sum.batches)*per
			w.FailedPerS = float64(sum.ended-sum.ok) * per
		}
		if sum.batches > 0 {
			w.RowsPerBatch = float64(sum.rows) / float64(sum.batches)
		}
		if there > 0 {
			w.Busy = min(1, float64(sum.computed)/(float64(there)*float64(time.Second)))
		}
		list = append(list, w)
	}
	return list
}
