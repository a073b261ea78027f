// SPDX-License-Identifier: Apache-2.0

package profile

import (
	"math"
	"slices"
)

// medianInterval is the median and its 95 % interval by order statistics: the
// interval from the r-th smallest to the r-th largest holds the true median
// unless r or more of n fair coins fail on one side, whatever the distribution.
// Below six values even the whole range holds it less surely; it is given then.
func medianInterval(values []float64) (median, low, high float64) {
	v := slices.Sorted(slices.Values(values))
	n := len(v)
	median = (v[(n-1)/2] + v[n/2]) / 2
	r := medianRank(n)
	return median, v[r], v[n-1-r]
}

// medianRank is the largest r with P(fewer than r+1 of n coins are heads) at most
// 2.5 %, counted from 0; 0 if there is none.
func medianRank(n int) int {
	if n > 1000 { // the binomial is a normal distribution by then
		return int(float64(n)/2 - 1.96*math.Sqrt(float64(n))/2 - 1)
	}
	r, sum := 0, 0.0
	for p := math.Exp2(-float64(n)); sum+p <= 0.025; r++ { // p: exactly r heads
		sum += p
		p = p * float64(n-r) / float64(r+1)
	}
	return max(0, r-1)
}
