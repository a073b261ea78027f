// SPDX-License-Identifier: Apache-2.0

package batcher

import (
	"math"
	"math/rand/v2"
	"testing"
)

// On a machine whose batches differ by far, as on one that others use, no size is taken
// to last for ever.
func TestNoSizeIsTakenToLastFarLongerThanTheLongestBatch(t *testing.T) {
	for seed := range uint64(50) {
		c := &costs{}
		rng := rand.New(rand.NewPCG(seed, 7))
		now, longest, worst := Time(1e9), 0.0, 0.0
		for range 1000 {
			rows := 1 + rng.IntN(10)
			if rng.IntN(3) > 0 {
				rows = 1 + rng.IntN(3)
			}
			took := Time(50e3 * math.Exp(2*rng.NormFloat64()))
			longest = max(longest, float64(took))
			c.observe(rows, 0, now, took, false)
			now += took + 10_000
			for r := 1; r <= 10; r++ {
				worst = max(worst, c.expected(r, 0)/longest)
			}
		}
		if worst > 50 {
			t.Errorf("seed %d: a size was taken to last %.3g times as long as the longest batch", seed, worst)
		}
	}
}
