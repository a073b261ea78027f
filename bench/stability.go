// SPDX-License-Identifier: Apache-2.0

package bench

import "math"

// sample is what the stability rule sees of a window.
type sample struct {
	Throughput float64
	Latency    float64
}

// stable reports whether the last three windows agree: each one's throughput
// and average latency within percent of the mean of the three.
func stable(windows []sample, percent float64) bool {
	if len(windows) < minWindows {
		return false
	}
	last := windows[len(windows)-minWindows:]
	agree := func(of func(sample) float64) bool {
		mean := 0.0
		for _, w := range last {
			mean += of(w) / minWindows
		}
		for _, w := range last {
			if math.Abs(of(w)-mean) > percent/100*mean {
				return false
			}
		}
		return mean > 0
	}
	return agree(func(s sample) float64 { return s.Throughput }) && agree(func(s sample) float64 { return s.Latency })
}
