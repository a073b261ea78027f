// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"time"

	"github.com/ringbatch/ringbatch/admin/stats"
	"github.com/ringbatch/ringbatch/internal/histogram"
	"github.com/ringbatch/ringbatch/status"
)

// keptSeconds is a power of two above the longest span and the present second.
const keptSeconds = 64

// seconds counts the last seconds of a stage, one by one. Requests cost nothing: a second
// is the difference of the running counts at its two ends, taken by the first event after
// it (rollSecond). A cell with the number of another second counts as empty.
type seconds struct {
	present int64  // the present second, on the loop's clock
	first   int64  // the stage's first second
	base    counts // at the beginning of the present second
	total   histogram.Histogram
	cells   [keptSeconds]second
}

// counts are the running counts that spans need.
type counts struct{ requests, ended, ok, rows, batches uint64 }

type second struct {
	number int64
	counts
	computed int64 // ns that workers computed in it
	present  int   // workers at its end
	total    []histogram.Delta
}

func (c *counts) add(o *counts) {
	c.requests += o.requests
	c.ended += o.ended
	c.ok += o.ok
	c.rows += o.rows
	c.batches += o.batches
}

func (s *seconds) cellOf(number int64) *second {
	c := &s.cells[number%keptSeconds]
	if c.number != number {
		*c = second{number: number, total: c.total[:0]}
	}
	return c
}

// rollSecond ends the present second if it is over. Events at now are counted after it.
func (s *stageStats) rollSecond(now int64, workers int) {
	at := now / int64(time.Second)
	if at == s.seconds.present {
		return
	}
	is := counts{s.requests, s.allEnded(), s.byStatus[status.OK], s.rows, s.batches}
	if was := &s.seconds.base; s.seconds.first == 0 {
		s.seconds.first = at
	} else {
		c := s.seconds.cellOf(s.seconds.present)
		c.counts = counts{is.requests - was.requests, is.ended - was.ended, is.ok - was.ok, is.rows - was.rows, is.batches - was.batches}
		c.present = workers
		if c.ended > 0 {
			c.total = s.total.Since(&s.seconds.total, c.total[:0])
		}
	}
	s.seconds.base, s.seconds.total, s.seconds.present = is, s.total, at
}

func (s *stageStats) allEnded() (n uint64) {
	for _, k := range &s.byStatus {
		n += k
	}
	return n
}

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

// spanLengths are the spans of the statistics, in seconds.
var spanLengths = []int{1, 10, 60}

// lastSeconds sums up the last whole seconds. Seconds without events had as many workers.
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
			sum.counts.add(&c.counts)
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
