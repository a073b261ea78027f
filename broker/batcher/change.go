// SPDX-License-Identifier: Apache-2.0

package batcher

import "math/bits"

// A load that has fallen to a tenth sends in a second what it sent in a tenth of one
// before, and a window that has enough requests is mostly of the time before. So
// windows do not reach back beyond a change: the place in them where the gaps between
// requests become others. Gaps tell that better than how many requests came in a time:
// those within a burst are alike, however long the pause before the next is.

const (
	// changeLasts is how long a load must have been another.
	changeLasts = remembered / 4
	// changeOctaves is by how many powers of two gaps must differ on average: by 3 times.
	changeOctaves = 1.6
	// changeEvidence is the least weight of the difference, in octaves squared times
	// requests, that is no chance; one gap of a Poisson load varies by 3.4.
	changeEvidence = 100
)

// findChange looks for a change of the load among the latest n requests, and notes it.
// A closed loop has none of its own: how its requests come depends on how they are answered.
func (l *learner) findChange(n int) (found bool) {
	if l.waits.closed || n < 2*fewRecords {
		return false
	}
	latest := l.latest(0).clock()
	sum, at := 0, latest
	for i := 1; i < n; i++ {
		before := l.latest(i).clock()
		sum += gapOctave(at - before)
		at = before
	}
	best, place := float64(changeEvidence), 0
	late := 0
	at = latest
	for k := 1; k <= n-fewRecords; k++ {
		before := l.latest(k).clock()
		late += gapOctave(at - before)
		at = before
		if k < fewRecords || latest-at < changeLasts {
			continue
		}
		a, b := float64(k), float64(n-1-k)
		differ := float64(late)/a - float64(sum-late)/b
		if weight := differ * differ * a * b / (a + b); weight > best && max(differ, -differ) > changeOctaves {
			best, place = weight, k
		}
	}
	if place > 0 {
		l.changed = l.count - place
	}
	return place > 0
}

// gapOctave is about the logarithm of the time between two requests.
func gapOctave(gap Time) int { return bits.Len64(uint64(max(1, gap))) }
