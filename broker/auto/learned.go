// SPDX-License-Identifier: Apache-2.0

package auto

import "time"

// Learned is what an advisor has learned, for people to read.
type Learned struct {
	Wait       time.Duration // in force
	OneAtATime bool          // batches that are not full go one at a time
	Tried      []TriedWait   // with wait_time auto: what the last replays found, by ascending wait
	Costs      []LearnedCost // by ascending rows, of all shapes together
	// Slowdown[i] is how many times as long a batch takes with i other workers
	// busy as with none.
	Slowdown []float64
}

// TriedWait is what a wait would have done lately.
type TriedWait struct {
	Wait       time.Duration
	OneAtATime bool
	Latency    float64 // as a multiple of the latency without a wait
}

// LearnedCost is what a batch takes with no other worker busy.
type LearnedCost struct {
	Rows    int
	Time    time.Duration
	Batches int // of this size that were seen
}

func (a *Advisor) learned() (out Learned) {
	out.Wait, out.OneAtATime = time.Duration(a.plan.wait), a.plan.oneAtATime
	e := &a.evaluation
	for i := range e.candidates {
		if c := &e.candidates[i]; a.learns && e.isRecent(c) {
			out.Tried = append(out.Tried, TriedWait{time.Duration(c.wait), c.oneAtATime, c.ratio()})
		}
	}
	s := a.commonShape()
	var t table
	lanes := max(1, a.lanes())
	if t.fill(&s.costs, a.settings.MaxBatchSize, lanes-1); !t.known {
		return out
	}
	for i := 0; i <= classOf(a.settings.MaxBatchSize); i++ {
		batches := 0
		for j := range s.curves {
			batches += int(s.curves[j].cells[i].count)
		}
		if batches > 0 {
			out.Costs = append(out.Costs, LearnedCost{sizeOf(i), time.Duration(t.times[0][i]), batches})
		}
	}
	for j := range min(lanes, maxOthers+1) {
		out.Slowdown = append(out.Slowdown, float64(t.times[j][0])/float64(t.times[0][0]))
	}
	return out
}

// commonShape is the shape of which most batches were seen.
func (a *Advisor) commonShape() *shape {
	best := &a.shapes[0]
	for i := range a.shapes {
		if a.shapes[i].batches > best.batches {
			best = &a.shapes[i]
		}
	}
	return best
}
