// SPDX-License-Identifier: Apache-2.0

package batcher

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"
)

// check compares what all sizes are taken to last with what they do.
func (w *costWorld) check(t *testing.T, when string) {
	t.Helper()
	var table costTable
	table.fill(&w.costs, 32, 2)
	for others := range 3 {
		for _, rows := range []int{1, 8, 16, 32} {
			if x := float64(table.of(rows, others)) / float64(w.takes(rows)); x < 0.8 || x > 1.25 {
				t.Errorf("%s: %d rows beside %d others are taken to last %.2f times as long as they do", when, rows, others, x)
			}
		}
	}
}

// When batches take a tenth, workers are seldom busy at once any more: all that is seen
// are sizes and numbers of others that were not seen before. They fit to each other, and
// still tell that full batches beside others are quick now.
func TestAPaceIsThatOfAllSizesIfOnlyNewOnesAreSeenWithIt(t *testing.T) {
	w := &costWorld{pace: 1, perRow: 100 * time.Microsecond}
	for others := range 3 {
		w.runBeside(1, others)
	}
	for i := range 400 {
		w.runBeside(14+i*7%19, 2)
	}
	w.pace = 0.1
	for i := range 8 {
		w.runBeside(17+i*3%16, 0)
	}
	w.check(t, "after 8 batches")
	for i := range 5000 {
		w.runBeside(1+i%10, i%2)
	}
	w.check(t, "after 5000 more")
}

// A size that was seen two or three times is taken to be as quick as it turns out to be,
// at once. It must not tell then that all is as it was.
func TestASizeThatIsKnownALittleTellsOfAnotherPace(t *testing.T) {
	w := &costWorld{pace: 1, perRow: 100 * time.Microsecond}
	for i := range 100 {
		w.runBeside(20+i%12, 0)
	}
	for i := range 6 {
		w.runBeside(2+i%3, 0)
	}
	w.pace = 0.1
	for i := range 4 {
		w.runBeside(2+i%2, 0)
	}
	w.check(t, "after 4 batches")
}

// What began before the pace changed ends at the old one: it does not tell that nothing
// has changed.
func TestABatchThatBeganBeforeTellsNothingOfThePaceNow(t *testing.T) {
	w := &costWorld{pace: 1, perRow: 100 * time.Microsecond}
	for i := range 2000 {
		w.runBeside(1+i%32, i%3)
	}
	long := w.takes(32)
	began := w.now
	w.pace = 0.1
	w.now += long / 4
	w.runBeside(8, 1)
	w.runBeside(9, 1)
	w.observe(32, 2, began, long, false)
	w.runBeside(10, 1)
	w.check(t, "after 3 batches")
}

// The long-run time of a size that is rarely seen does not go where its batches happen to be.
func TestWhatARareSizeTakesDoesNotWalkAway(t *testing.T) {
	takes := func(rows int) float64 { return 300e3 * (1 + 0.1*float64(rows)/32) }
	worst := 0.0
	for seed := range uint64(8) {
		c := &costs{}
		rng := rand.New(rand.NewPCG(seed, 2))
		now, off, n := Time(1e9), 0.0, 0.0
		for i := range 100_000 {
			rows := 20 + rng.IntN(5)
			if rng.IntN(200) == 0 {
				rows = 1 + rng.IntN(8)
			}
			took := Time(takes(rows) * math.Exp(0.4*rng.NormFloat64()-0.08))
			c.observe(rows, 0, now, took, false)
			if now += took + 10_000; i > 10_000 && i%50 == 0 {
				var table costTable
				table.fill(c, 32, 0)
				off += math.Log(float64(table.of(1, 0)) / takes(1))
				n++
			}
		}
		worst = max(worst, math.Abs(off/n))
	}
	if worst > 0.8 {
		t.Errorf("one row is off by %.2f, a logarithm, on average", worst)
	}
}

func TestAStepIsNoticedHoweverManyBatchesThereWere(t *testing.T) {
	for _, ran := range []uint32{0, 1<<31 + 1000, 1<<32 - 2400, 1<<32 - 1900} {
		c := &costs{}
		now, pace := Time(1e9), 1.0
		run := func(n int) {
			for i := range n {
				rows := 1 + i%8
				took := Time(pace * 1e6 * (1 + 0.1*float64(rows)))
				c.observe(rows, 0, now, took, false)
				now += took + 1000
			}
		}
		run(2000)
		c.batches += ran
		v := &c.curves[0]
		v.last += ran
		for i := v.seen.next(0); i >= 0; i = v.seen.next(i + 1) {
			v.points[i].last += ran
		}
		run(400)
		pace = 4
		if run(8); c.expected(4, 0) < 0.8*4*1.4e6 {
			t.Errorf("after %d batches a step is not noticed: 4 rows are taken for %.1f ms", ran, c.expected(4, 0)/1e6)
		}
	}
}
