// SPDX-License-Identifier: Apache-2.0

package batcher

import "math/bits"

// latencies is how many requests took how long, by classes of a quarter of a
// power of two: the tail of many replays together. Their tails one by one
// would not tell: the slowest 1 % of a bursty load are those of a few windows.
type latencies [latencyClasses]struct{ n, sum float32 }

const (
	shortestClass  = 10                       // a logarithm: 1 µs
	latencyClasses = 4 * (37 - shortestClass) // up to two minutes
	// tailShare of the requests are the tail: their mean is near p99, and steadier
	// with few of them.
	tailShare = 0.02
)

func latencyClass(x Time) int {
	octave := bits.Len64(uint64(x)) - 1
	if octave < shortestClass {
		return 0
	}
	return min(4*(octave-shortestClass)+int(x>>(octave-2)&3), latencyClasses-1)
}

func (l *latencies) note(x Time) {
	c := &l[latencyClass(x)]
	c.n++
	c.sum += float32(x)
}

func (l *latencies) add(kept float32, x *latencies) {
	for i := range l {
		l[i].n = l[i].n*kept + x[i].n
		l[i].sum = l[i].sum*kept + x[i].sum
	}
}

// count is how many they are.
func (l *latencies) count() (n float64) {
	for i := range l {
		n += float64(l[i].n)
	}
	return n
}

// tail is the mean of the slowest requests, tailShare of all.
func (l *latencies) tail() float64 {
	most := float32(l.count()) * tailShare
	n, sum := float32(0), float32(0)
	for i := len(l) - 1; i >= 0 && n < most; i-- {
		if c := &l[i]; c.n > 0 {
			part := min(1, (most-n)/c.n) // the last class counts in part
			n += part * c.n
			sum += part * c.sum
		}
	}
	return float64(sum / n)
}
