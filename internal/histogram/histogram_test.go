// SPDX-License-Identifier: Apache-2.0

package histogram

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

func TestQuantilesAreWithinABucketOfTheSortedTruth(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	var h Histogram
	var all []time.Duration
	for range 20000 {
		d := time.Duration(r.ExpFloat64() * float64(time.Millisecond))
		h.Add(d)
		all = append(all, d)
	}
	slices.Sort(all)
	for _, q := range []float64{0, 0.5, 0.9, 0.99, 0.999} {
		want, got := all[int(q*float64(len(all)-1))], h.Quantile(q)
		if got < want-want/10-2 || got > want+want/10+2 {
			t.Errorf("quantile %v is %v, want about %v", q, got, want)
		}
	}
	if h.Quantile(1) != all[len(all)-1] || h.Max() != all[len(all)-1] {
		t.Errorf("the largest is %v, got %v", all[len(all)-1], h.Quantile(1))
	}
}

func TestEveryValueFallsIntoABucketThatContainsIt(t *testing.T) {
	for shift := range 63 {
		for _, v := range []uint64{1<<shift - 1, 1 << shift, 1<<shift + 1} {
			i := index(v)
			if upper(i) < v || i > 0 && upper(i-1) >= v {
				t.Fatalf("%d is in bucket %d, which ends at %d", v, i, upper(i))
			}
		}
	}
}

func TestWhatAHistogramHasGrownByAddsUpToTheSameBuckets(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	var h, sum Histogram
	for range 5 {
		before := h
		for range 1000 {
			h.Add(time.Duration(r.ExpFloat64() * float64(time.Millisecond)))
		}
		sum.Grow(h.Since(&before, nil))
	}
	if !slices.Equal(h.Buckets(), sum.Buckets()) || h.Count() != sum.Count() {
		t.Errorf("the parts add up to %v, the whole is %v", sum.Buckets(), h.Buckets())
	}
	var n uint64
	for _, b := range h.Buckets() {
		n += b.Count
	}
	if n != h.Count() {
		t.Errorf("%d in buckets, %d in all", n, h.Count())
	}
}
