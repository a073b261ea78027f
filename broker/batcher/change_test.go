// SPDX-License-Identifier: Apache-2.0

package batcher

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/policy"
)

// arrivalsOf has a learner see requests: so many a second, in bursts if on is not 0, for a time.
func arrivalsOf(l *learner, rng *rand.Rand, from, to Time, rate float64, on, off Time) {
	end := Time(rng.ExpFloat64() * float64(on))
	at := from
	for {
		at += Time(rng.ExpFloat64() * float64(time.Second) / rate)
		for on > 0 && at > from+end {
			pause := Time(rng.ExpFloat64() * float64(off))
			at += pause
			end += pause + Time(rng.ExpFloat64()*float64(on))
		}
		if at > to {
			return
		}
		l.busy = 1 // or pauses would not count
		l.arrived(&Request{ID: RequestID(l.count % maxRecords), Rows: 1, Arrived: at}, 0)
	}
}

func TestAChangeOfTheLoadIsFoundAndOthersAreNot(t *testing.T) {
	const step, end = Time(2 * time.Second), Time(2500 * time.Millisecond)
	for _, c := range []struct {
		name          string
		before, after float64
		on, off       Time
		found         bool
	}{
		{"a tenth", 2000, 200, 0, 0, true},
		{"a tenth, in bursts", 4000, 400, 20 * ms, 60 * ms, true},
		{"ten times", 100, 1000, 0, 0, true},
		{"the same", 1000, 1000, 0, 0, false},
		{"the same, in bursts", 4000, 4000, 20 * ms, 60 * ms, false},
		{"the same, in long bursts", 2000, 2000, 150 * ms, 150 * ms, false},
		{"a little less", 1000, 700, 0, 0, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			found := 0
			for seed := range uint64(50) {
				l := newLearner(&policy.Settings{MaxBatchSize: 32, WaitTime: policy.Auto})
				rng := rand.New(rand.NewPCG(seed, 3))
				arrivalsOf(l, rng, 0, step, c.before, c.on, c.off)
				before := l.count
				arrivalsOf(l, rng, step, end, c.after, c.on, c.off)
				if !l.findChange(min(l.count, someRecords+l.count-before)) {
					continue
				}
				found++
				if late := l.latest(l.count - 1 - l.changed).arrived; c.found && (late < step-200*ms || late > step+200*ms) {
					t.Errorf("seed %d: found at %v", seed, time.Duration(late))
				}
			}
			if want := 45; c.found && found < want || !c.found && found > 1 {
				t.Errorf("found with %d of 50 seeds", found)
			}
		})
	}
}
