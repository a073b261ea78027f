// SPDX-License-Identifier: Apache-2.0

// Package histogram counts durations in buckets, 16 per doubling, so that a quantile is
// right within about 3 %. Histograms can be added, between models and over time.
package histogram

import (
	"math/bits"
	"time"
)

const (
	subBits = 4 // 16 buckets per doubling
	buckets = (64 - subBits) << subBits
)

// Histogram counts durations. The zero value is ready; a copy is independent.
type Histogram struct {
	counts [buckets]uint64
	n      uint64
	sum    time.Duration
	max    time.Duration
}

// Add counts one duration; negative ones count as zero.
func (h *Histogram) Add(d time.Duration) {
	d = max(0, d)
	h.counts[index(uint64(d))]++
	h.n++
	h.sum += d
	h.max = max(h.max, d)
}

func index(v uint64) int {
	if v < 1<<subBits {
		return int(v)
	}
	shift := bits.Len64(v) - subBits - 1
	return (shift+1)<<subBits + int(v>>shift) - 1<<subBits
}

// upper is the largest value of a bucket.
func upper(i int) uint64 {
	if i < 1<<subBits {
		return uint64(i)
	}
	shift := i>>subBits - 1
	return (uint64(i&(1<<subBits-1)+1<<subBits)+1)<<shift - 1
}

// Count is the number of durations.
func (h *Histogram) Count() uint64 { return h.n }

// Sum is the sum of all durations.
func (h *Histogram) Sum() time.Duration { return h.sum }

// Mean is the mean duration.
func (h *Histogram) Mean() time.Duration {
	if h.n == 0 {
		return 0
	}
	return h.sum / time.Duration(h.n)
}

// Max is the largest duration.
func (h *Histogram) Max() time.Duration { return h.max }

// Quantile is the duration that a share q of all durations did not exceed.
func (h *Histogram) Quantile(q float64) time.Duration {
	if h.n == 0 {
		return 0
	}
	rank, seen := uint64(q*float64(h.n)), uint64(0)
	for i, c := range h.counts {
		if seen += c; seen > rank || seen == h.n {
			return min(time.Duration(upper(i)), h.max)
		}
	}
	return h.max
}

// Bucket counts durations that are at most Upper and above the bucket before.
type Bucket struct {
	Upper time.Duration
	Count uint64
}

// Buckets are the buckets that are not empty, ascending.
func (h *Histogram) Buckets() []Bucket {
	list := []Bucket{}
	for i, n := range h.counts {
		if n > 0 {
			list = append(list, Bucket{time.Duration(upper(i)), n})
		}
	}
	return list
}

// Delta is the growth of one bucket.
type Delta struct {
	bucket uint16
	n      uint32
}

// Since appends the growth of h since before, an earlier copy of h.
func (h *Histogram) Since(before *Histogram, list []Delta) []Delta {
	for i, n := range h.counts {
		if more := n - before.counts[i]; more > 0 {
			list = append(list, Delta{uint16(i), uint32(min(more, 1<<32-1))})
		}
	}
	return list
}

// Grow adds deltas of Since. Sum and maximum count each duration as its bucket's upper end.
func (h *Histogram) Grow(list []Delta) {
	for _, d := range list {
		h.counts[d.bucket] += uint64(d.n)
		h.n += uint64(d.n)
		h.sum += time.Duration(upper(int(d.bucket))) * time.Duration(d.n)
		h.max = max(h.max, time.Duration(upper(int(d.bucket))))
	}
}
