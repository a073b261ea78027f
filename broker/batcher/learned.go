package batcher

import "time"

// Learned is what the batcher has learned, for people to read.
type Learned struct {
	Wait    time.Duration // in force
	Tried   []TriedWait   // with wait_time auto: what the last replays found, by ascending wait
	Batches [8]int
}

// TriedWait is what a wait would have done lately.
type TriedWait struct {
	Wait time.Duration
	Mean float64 // latency, as a multiple of that without any wait
}

// Learned copies what is known now.
func (b *Batcher) Learned() Learned { return b.learner.learned() }

func (l *learner) learned() (out Learned) {
	out.Wait = time.Duration(l.wait)
	if l.auto {
		for i := range l.waits.rungs {
			if l.waits.lately(i) {
				out.Tried = append(out.Tried, TriedWait{rungWait(i), l.waits.score(i)})
			}
		}
	}
	c := &l.shapes[0].costs
	var t costTable
	t.fill(c, 1, 0)
	if !t.known {
		return out
	}
	for j := range c.curves {
		out.Batches[j] = c.curves[j].count
	}
	return out
}
