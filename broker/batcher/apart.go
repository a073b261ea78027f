// SPDX-License-Identifier: Apache-2.0

package batcher

import (
	"math"

	"github.com/ringbatch/ringbatch/policy"
)

// Batches that go apart, one after the other: with wait_time auto, and where that is
// quicker (waits.go), what is not full is held back while a batch runs, though another
// worker is free.

const (
	// overdueAfter times as long as a batch should take, nothing is held back for it any
	// more: its worker may hang. Nor is anything for as many times what batches take
	// lately: what runs may be a rare one that takes far longer.
	overdueAfter = 3
	// mostApart is for how many workers that is tried: what more of them do to each other
	// is not known.
	mostApart = maxOthers + 1
	// leapRoom is the share of its time in which one worker alone must be able to do all of it,
	// if batches came to take twice as long, or half, lately. What was remembered since is too
	// little to tell how long the queue would become.
	leapRoom = 0.7
)

// heldFor is how long a batch is held back at most; 0 if none is.
func (l *learner) heldFor() Time {
	if !l.apart {
		return 0
	}
	return l.longestHold()
}

func (l *learner) longestHold() Time { return Time(overdueAfter * l.took) }

// heldUntil is until when batches that are not full are held back; now if they are not.
// What has a deadline is not, nor what waits with it: how long that may wait was found
// for a worker that is free.
func (b *Batcher) heldUntil(now Time) Time {
	most := b.heldFor
	if b.learner != nil {
		most = b.learner.heldFor()
	}
	if most == 0 || b.dated > 0 {
		return now
	}
	runs := now
	for i := range b.workers {
		switch x := &b.workers[i]; {
		case !x.attached || len(x.batches) == 0:
		case b.learner != nil:
			runs = max(runs, b.learner.overdueAt(WorkerID(i)))
		default: // no worker of a replay hangs
			runs = Never
		}
	}
	return max(now, min(runs, min(now, b.heldFrom)+most))
}

// overdueAt is when the batch that a worker runs should be done, and long since.
func (l *learner) overdueAt(w WorkerID) Time {
	x := &l.workers[w]
	p := &x.batches[0]
	return x.began(p) + Time(overdueAfter*l.expectedOf(p))
}

// mayGoApart says whether batches may run at the same time, and may wait for each other:
// replays do not know of queue timeouts.
func (p *replay) mayGoApart(s *policy.Settings) bool {
	lanes := 0
	for i := range p.workers {
		lanes += max(1, p.workers[i].Lanes)
	}
	for i := range s.Levels {
		if s.Levels[i].DefaultTimeout > 0 {
			return false
		}
	}
	return lanes > 1 && len(p.workers) <= mostApart
}

// leavesRoom says whether one worker would have time to spare with the requests of the
// window, if its batches were the cheapest.
func (p *replay) leavesRoom() bool {
	rows := make([]int, len(p.costs))
	for i := range p.window {
		rows[p.window[i].shape] += int(p.window[i].rows)
	}
	work, most := 0.0, p.batcher.settings.MaxBatchSize
	for shape, n := range rows {
		if n == 0 {
			continue
		}
		least := math.Inf(1)
		for class := range sizeClass(most) + 1 {
			size := min(sizeOf(class), most)
			least = min(least, float64(p.cost(size, shape, 0))/float64(size))
		}
		work += least * float64(n)
	}
	return work < leapRoom*float64(p.window[len(p.window)-1].arrived-p.window[0].arrived)
}
