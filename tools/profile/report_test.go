// SPDX-License-Identifier: Apache-2.0

package profile

import (
	"math/rand/v2"
	"testing"
)

// The promise of an interval: it holds the true median about 19 times out of 20.
func TestTheIntervalHoldsTheMedianAsOftenAsItSays(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	for _, n := range []int{6, 10, 37, 200, 1500} {
		held := 0
		const trials = 2000
		for range trials {
			v := make([]float64, n)
			for i := range v {
				v[i] = rnd.ExpFloat64() // median ln 2, and a long tail
			}
			m, low, high := medianInterval(v)
			if low > m || m > high {
				t.Fatalf("%d values: median %v outside of %v … %v", n, m, low, high)
			}
			if low <= 0.6931471805599453 && 0.6931471805599453 <= high {
				held++
			}
		}
		if share := float64(held) / trials; share < 0.935 || share > 0.99 { // 0.95 and more, within four standard deviations
			t.Errorf("%d values: %.3f of the intervals hold it", n, share)
		}
	}
	for n := 1; n < 6; n++ {
		if r := medianRank(n); r != 0 {
			t.Errorf("%d values: rank %d", n, r)
		}
	}
}
