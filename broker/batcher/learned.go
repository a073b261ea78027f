// SPDX-License-Identifier: Apache-2.0

package batcher

import "time"

// Learned is what the batcher has learned, for people to read.
type Learned struct {
	Wait  time.Duration // in force
	Apart bool          // batches go one after the other (apart.go)
	Tried []TriedWait   // with wait_time auto: what the last replays found, by ascending wait
	Costs []LearnedCost // by ascending rows, of all shapes together
	// Slowdown[i] is how many times as long a batch takes with i other workers
	// busy as with none.
	Slowdown []float64
}

// TriedWait is what a wait would have done lately.
type TriedWait struct {
	Wait    time.Duration
	Apart   bool
	Latency float64 // as a multiple of what it would have been without any wait
}

// LearnedCost is what a batch takes with no other worker busy.
type LearnedCost struct {
	Rows    int
	Time    time.Duration
	Batches int // of this size that were seen
}

// Learned is a copy of what is known now.
func (b *Batcher) Learned() Learned { return b.learner.learned() }

func (l *learner) learned() (out Learned) {
	out.Wait, out.Apart = time.Duration(l.wait), l.apart
	for i := range l.waits.rungs {
		if l.auto && l.waits.lately(i) {
			out.Tried = append(out.Tried, TriedWait{l.waits.wait(i), i == apart, l.waits.mean(i)})
		}
	}
	workers := 0
	for i := range l.workers {
		if l.workers[i].here {
			workers++
		}
	}
	c := &l.shapes[0].costs
	var t costTable
	if t.fill(c, l.settings.MaxBatchSize, max(0, workers-1)); !t.known {
		return out
	}
	for i := 0; i <= sizeClass(l.settings.MaxBatchSize); i++ {
		batches := 0
		for j := range c.curves {
			batches += int(c.curves[j].points[i].count)
		}
		if batches > 0 {
			out.Costs = append(out.Costs, LearnedCost{sizeOf(i), time.Duration(t.times[0][i]), batches})
		}
	}
	for j := range min(workers, maxOthers+1) {
		out.Slowdown = append(out.Slowdown, float64(t.times[j][0])/float64(t.times[0][0]))
	}
	return out
}
