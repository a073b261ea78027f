// SPDX-License-Identifier: Apache-2.0

package auto

import (
	"math"
	"math/rand/v2"
	"testing"
)

// seeBatches observes batches of one size, one after the other, from a time on.
func seeBatches(c *costs, n, rows, others int, from, took Time) (end Time, changed bool) {
	for range n {
		changed = c.observe(sample{rows, others, from, from + took}, false) || changed
		from += took
	}
	return from, changed
}

func isAbout(t *testing.T, c *costs, rows, others int, want Time) {
	t.Helper()
	if got := c.expected(rows, others); math.Abs(got/float64(want)-1) > 0.05 {
		t.Errorf("%d rows beside %d others take %.0f µs, want %d", rows, others, got/1000, want/us)
	}
}

func TestOneSlowBatchHardlyCounts(t *testing.T) {
	var c costs
	at, _ := seeBatches(&c, 20, 8, 0, 0, 5*ms)
	at, changed := seeBatches(&c, 1, 8, 0, at, 80*ms)
	seeBatches(&c, 3, 8, 0, at, 5*ms)
	if isAbout(t, &c, 8, 0, 5*ms); changed {
		t.Error("it counts as a change")
	}
}

func TestThreeSlowBatchesInARowAreAChange(t *testing.T) {
	var c costs
	at, _ := seeBatches(&c, 20, 8, 0, 0, 5*ms)
	at, _ = seeBatches(&c, 20, 1, 0, at, 4*ms)
	at, changed := seeBatches(&c, 2, 8, 0, at, 50*ms)
	if changed {
		t.Error("two are a change")
	}
	if _, changed = seeBatches(&c, 1, 8, 0, at, 50*ms); !changed {
		t.Error("three are none")
	}
	isAbout(t, &c, 8, 0, 50*ms)
	isAbout(t, &c, 1, 0, 50*ms) // its old cost is forgotten
}

// The whole machine stands still for a moment, and every worker has a batch then.
func TestAStandstillIsNoChange(t *testing.T) {
	var c costs
	at, _ := seeBatches(&c, 40, 8, 2, 0, 5*ms)
	for range 4 {
		if c.observe(sample{8, 2, at, at + 100*ms}, false) {
			t.Fatal("a standstill is taken for a change")
		}
	}
	seeBatches(&c, 1, 8, 2, at+100*ms, 5*ms)
	isAbout(t, &c, 8, 2, 5*ms)
}

func TestTheFirstBatchOfASizeMayBeCold(t *testing.T) {
	var c costs
	at, _ := seeBatches(&c, 10, 4, 0, 0, 5*ms)
	c.observe(sample{8, 0, at, at + 500*ms}, true)
	if got := c.expected(8, 0); got > float64(10*ms) {
		t.Errorf("8 rows take %.0f µs", got/1000)
	}
	c.observe(sample{8, 0, at, at + 6*ms}, true) // not slow: it counts
	isAbout(t, &c, 8, 0, 6*ms)
}

// The plain version: look at all seen sizes, and take the nearest below and above.
func plainAt(seen map[int]float64, rows int) float64 {
	low, below, high := -1, -1, -1
	for size := range seen {
		if size <= rows && size > low {
			low = size
		}
		if size >= rows && (high < 0 || size < high) {
			high = size
		}
	}
	for size := range seen {
		if size < low && size > below {
			below = size
		}
	}
	switch {
	case low < 0 && high < 0:
		return 0
	case low < 0:
		return seen[high]
	case low == high:
		return seen[low]
	case high < 0 && below < 0:
		return seen[low] * (1 + 0.1*float64(rows-low)/float64(low))
	case high < 0:
		return seen[low] + float64(rows-low)*max(0, seen[low]-seen[below])/float64(low-below)
	}
	return seen[low] + float64(rows-low)*(seen[high]-seen[low])/float64(high-low)
}

func TestSizesBetweenThoseSeenLieOnALine(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	for range 2000 {
		var v curve
		seen := map[int]float64{}
		for range rng.IntN(5) {
			class := rng.IntN(exactSizes)
			v.cells[class] = cell{time: 1 + 100*rng.Float64(), count: 1}
			seen[sizeOf(class)] = v.cells[class].time
			v.count++
		}
		rows := 1 + rng.IntN(exactSizes)
		if got, want := v.at(rows), plainAt(seen, rows); math.Abs(got-want) > 1e-9 {
			t.Fatalf("%d rows take %v, want %v, of %v", rows, got, want, seen)
		}
	}
}

func TestASizeClassHasItsMiddle(t *testing.T) {
	for rows := 1; rows < 1<<20; rows += 1 + rows/100 {
		class := classOf(rows)
		off := math.Abs(float64(sizeOf(class))/float64(rows) - 1)
		if class >= sizeClasses || off > 0.08 || classOf(sizeOf(class)) != class {
			t.Fatalf("%d rows are of class %d, which has %d", rows, class, sizeOf(class))
		}
	}
}

// Beside other workers a batch takes as many times as long as the sizes that were seen
// there, and never longer than if they took turns.
func TestATableIsCompletedFromWhatWasSeen(t *testing.T) {
	var c costs
	at, _ := seeBatches(&c, 10, 1, 0, 0, 2*ms)
	at, _ = seeBatches(&c, 10, 8, 0, at, 4*ms)
	seeBatches(&c, 5, 8, 1, at, 6*ms)
	var x table
	if !x.fill(&c, 8, 2) {
		t.Fatal("nothing is known")
	}
	for _, want := range []struct {
		rows, others int
		took         Time
	}{{1, 0, 2 * ms}, {8, 0, 4 * ms}, {8, 1, 6 * ms}, {1, 1, 3 * ms}, {8, 2, 6 * ms}, {1, 2, 3 * ms}} {
		if got := x[want.others][classOf(want.rows)]; got != want.took {
			t.Errorf("%d rows beside %d others take %d µs, want %d", want.rows, want.others, got/us, want.took/us)
		}
	}
}
