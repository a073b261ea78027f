// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"math"
	"math/bits"
	"time"

	"github.com/ringbatch/ringbatch/broker/batcher"
)

func (d *Disturbances) validate() error {
	if d.SlowOneIn < 0 || d.SlowOneIn > 0 && !(d.SlowTimes > 0 && d.SlowTimes <= 1000) {
		return bad("one batch in %d takes %v times as long, must be 0..1000 times", d.SlowOneIn, d.SlowTimes)
	}
	if d.StallFor < 0 || d.StallFor > 0 && d.StallEvery < 2*d.StallFor || d.StallEvery > time.Hour {
		return bad("stalls of %v every %v: must be at most half of the time, and an hour", d.StallFor, d.StallEvery)
	}
	if !(d.Wander >= 0 && d.Wander <= 1) || d.Wander > 0 && d.WanderFor < time.Duration(paceStep) {
		return bad("a pace that wanders by %v in %v: must be 0..1, in %v or more", d.Wander, d.WanderFor, time.Duration(paceStep))
	}
	if d.Cold < 0 || d.Cold > time.Hour {
		return bad("the first batch of a size takes %v longer, must be 0..%v", d.Cold, time.Hour)
	}
	return nil
}

// slowed is what a batch takes that would take so long undisturbed.
func (w *world) slowed(took batcher.Time) batcher.Time {
	took = batcher.Time(float64(took) * w.pace())
	if d := &w.cfg.Disturbances; d.SlowOneIn > 0 && w.luck.IntN(d.SlowOneIn) == 0 {
		return batcher.Time(float64(took) * d.SlowTimes)
	}
	return took
}

// cold is how much longer a batch takes because it is the worker's first of about
// its size.
func (w *world) cold(x *simulatedWorker, rows int) batcher.Time {
	octave := bits.Len(uint(rows - 1))
	if x.warm&(1<<octave) != 0 {
		return 0
	}
	x.warm |= 1 << octave
	return batcher.Time(w.cfg.Disturbances.Cold)
}

// paceStep is how long a pace lasts.
const paceStep = batcher.Time(5 * time.Millisecond)

// pace is how many times as long batches take now: the same at the same time,
// whatever the policy does.
func (w *world) pace() float64 {
	d := &w.cfg.Disturbances
	if d.Wander == 0 {
		return 1
	}
	at := int(w.now / paceStep)
	kept := math.Exp(-float64(paceStep) / float64(d.WanderFor))
	for last := 0.0; len(w.paces) <= at; w.paces = append(w.paces, kept*last+math.Sqrt(1-kept*kept)*d.Wander*w.wander.NormFloat64()) {
		if n := len(w.paces); n > 0 {
			last = w.paces[n-1]
		}
	}
	return math.Exp(w.paces[at])
}

// awake is the first time from at on at which the machine does not stand still.
func (w *world) awake(at batcher.Time) batcher.Time {
	d := &w.cfg.Disturbances
	if d.StallFor == 0 || at == batcher.Never {
		return at
	}
	if into := at % batcher.Time(d.StallEvery); at > into && into < batcher.Time(d.StallFor) {
		return at - into + batcher.Time(d.StallFor)
	}
	return at
}

// after is when what begins while the machine does not stand still, and takes so
// long, ends.
func (w *world) after(start, took batcher.Time) batcher.Time {
	d := &w.cfg.Disturbances
	if d.StallFor == 0 {
		return start + took
	}
	every, still := batcher.Time(d.StallEvery), batcher.Time(d.StallFor)
	for {
		next := (start/every + 1) * every // the next stall
		if took <= next-start {
			return start + took
		}
		took -= next - start
		start = next + still
	}
}
