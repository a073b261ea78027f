// SPDX-License-Identifier: Apache-2.0

package batcher

import (
	"math"
	"slices"
)

// loop tells whether clients send because they were answered (a closed loop) or when
// they please (an open one). One window seldom tells: latencies hardly differ where
// batches are alike, and an open loop looks like a closed one by chance as often as
// not. So what windows told before counts, too, less and less.
type loop struct {
	evidence float64 // for a closed one, a logarithm of odds; <0: for an open one
	prior    float64 // what is likely where nothing else tells
}

const (
	evidenceKept = 0.7 // from one window to the next
	mostEvidence = 8.0 // of one window: its requests are not as many accounts of it
	likelyLoop   = 2.0
	// maxFeedback of a window's requests are looked at, for the time that takes.
	maxFeedback = 512
)

func (l *loop) closed() bool { return l.evidence+l.prior > 0 }

// observe learns from a window.
func (l *loop) observe(f *feedback) {
	l.evidence *= evidenceKept
	if len(f.gaps) < 4 || f.waitSum <= 0 { // answers that took no time tell nothing
		return
	}
	l.prior = -likelyLoop
	if f.gapSum < 2*f.waitSum { // clients wait for us for most of the time
		l.prior = likelyLoop
	}
	l.evidence += max(-mostEvidence, min(f.evidence(), mostEvidence))
}

// feedback is what the requests of a window tell of that: the time from one request
// of a client, which has up to k in flight, to its k-th next (its gap), and what is
// left of it from when the client had that many answers more (its rest).
type feedback struct {
	gaps, rests     []float64
	gapSum, waitSum float64
}

func (f *feedback) add(gap, wait float64) {
	f.gaps = append(f.gaps, gap)
	f.rests = append(f.rests, gap-wait)
	f.gapSum += gap
	f.waitSum += wait
}

// evidence is about the logarithm of how much likelier the gaps are if clients send
// because they were answered: then a longer latency makes the later request come
// later by as much, and the rests differ less than the gaps do. What counts is the half
// of them that lies closest together. Others may span the time between two bursts,
// before which the last batch waits for longer, too, so that it would look as if the
// next burst had waited for it.
func (f *feedback) evidence() float64 {
	n := float64(len(f.gaps))
	least := f.waitSum / n / 100 // or what always takes exactly the same would be infinitely likely
	return n / 2 * math.Log((halfWidth(f.gaps)+least)/(halfWidth(f.rests)+least))
}

// halfWidth is the length of the shortest interval that has half of x. It sorts x.
func halfWidth(x []float64) float64 {
	slices.Sort(x)
	half := len(x) / 2
	shortest := x[half] - x[0]
	for i := 1; i+half < len(x); i++ {
		shortest = min(shortest, x[i+half]-x[i])
	}
	return shortest
}
