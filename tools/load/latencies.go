// SPDX-License-Identifier: Apache-2.0

package load

import (
	"maps"
	"math/bits"
	"slices"
)

// durations counts nanoseconds, rounded down to three digits. Processes send it as JSON.
type durations map[int64]int64

func (d durations) add(nanos int64) {
	const digits = 11 // binary
	low := max(0, bits.Len64(uint64(max(0, nanos)))-digits)
	d[max(0, nanos)>>low<<low]++
}

func (d durations) merge(other durations) {
	for nanos, n := range other {
		d[nanos] += n
	}
}

// milliseconds returns for each share, ascending, the duration that this share of all durations did not exceed.
func (d durations) milliseconds(shares ...float64) []float64 {
	var all, seen int64
	for _, n := range d {
		all += n
	}
	found := make([]float64, 0, len(shares))
	for _, nanos := range slices.Sorted(maps.Keys(d)) {
		seen += d[nanos]
		for len(found) < len(shares) && float64(seen) >= shares[len(found)]*float64(all) {
			found = append(found, float64(nanos)/1e6)
		}
	}
	return found
}
