// SPDX-License-Identifier: Apache-2.0

package auto

import (
	"math"
	"slices"
	"time"

	"github.com/ringbatch/ringbatch/broker/batcher"
	"github.com/ringbatch/ringbatch/policy"
)

// usualWaits are the waits that are tried without a latency goal, in microseconds.
var usualWaits = []Time{10, 20, 50, 100, 250, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000}

// evaluation replays the latest requests with every candidate, and chooses one.
type evaluation struct {
	goal       Time        // latency_goal; 0: none
	candidates []candidate // no wait first, then longer and longer waits, then one at a time
	chosen     int

	queue   []int // candidates that the present evaluation has yet to play
	begun   Time  // when the last began
	begunAt int   // requests so far, then
	base    outcome

	rate       float64 // of requests, at the last evaluation
	changes    int     // of costs, likewise
	hurryUntil Time
	credit     float64 // steps that may be taken
	lastNow    Time
}

// candidate is a plan and what replays found. Sums fade with time.
type candidate struct {
	plan
	with, without outcome // with the plan, and of the same requests without a wait
	replays       float64
	at            Time // when the evaluation of the last began
}

func newEvaluation(goal Time) evaluation {
	e := evaluation{goal: goal, candidates: make([]candidate, 1), begun: -batcher.Never / 2}
	for i, wait := range usualWaits {
		wait *= Time(time.Microsecond)
		if goal > 0 { // shares of it, closer together where they are short
			part := float64(i+1) / float64(len(usualWaits))
			wait = Time(part * part * float64(goal))
		}
		e.candidates = append(e.candidates, candidate{plan: plan{wait: wait}})
	}
	e.candidates = append(e.candidates, candidate{plan: plan{oneAtATime: true}})
	return e
}

// Learn goes on with the evaluation in progress, or begins one when it is time.
func (a *Advisor) Learn(now Time) {
	if !a.learns {
		return
	}
	e := &a.evaluation
	steps := float64(now-e.lastNow) / float64(stepEach)
	if now < e.hurryUntil {
		steps *= hurry
	}
	e.credit, e.lastNow = min(e.credit+steps, maxSteps), now
	if len(e.queue) == 0 && !a.beginEvaluation(now) {
		return
	}
	for ; e.credit >= 1; e.credit-- {
		if a.replay.step() {
			continue
		}
		e.noteOutcome(a.replay.endPlay())
		if len(e.queue) == 0 {
			e.choose()
			a.plan = e.candidates[e.chosen].plan
			return
		}
		a.replay.beginPlay(e.candidates[e.queue[0]].plan)
	}
}

// beginEvaluation begins one if there is enough to learn from.
func (a *Advisor) beginEvaluation(now Time) bool {
	e := &a.evaluation
	fresh := a.count - e.begunAt
	if a.took == 0 || e.credit < 1 || a.changes == e.changes && fresh < enoughRequests/4 && (fresh == 0 || now < e.begun+remembered/4) {
		return false
	}
	n := a.replaySize(now)
	if n < fewRequests {
		return false
	}
	e.credit -= float64(n) / 4 // for loading them
	a.replay.load(a, n)
	rate := float64(n) / float64(max(1, now-a.latest(n-1).arrived))
	if a.changes != e.changes || rate > 3*e.rate || 3*rate < e.rate {
		// After such a change, old results do not count. One batch at a time may be too slow now.
		for i := range e.candidates {
			e.candidates[i] = candidate{plan: e.candidates[i].plan}
		}
		if a.plan.oneAtATime {
			e.chosen, a.plan = 0, plan{}
		}
		e.hurryUntil, e.rate = now+remembered, rate
	}
	e.rate += (rate - e.rate) / 4
	e.changes, e.begun, e.begunAt = a.changes, now, a.count
	e.queue = e.queue[:0]
	last := len(e.candidates) - 1
	for i := range last {
		if i < 2 || e.goal > 0 || float64(e.candidates[i-1].wait) < longestWait*a.took {
			e.queue = append(e.queue, i)
		}
	}
	// Batches may go one at a time without a latency goal, and without queue timeouts, which replays ignore.
	hasTimeout := slices.ContainsFunc(a.settings.Levels, func(l policy.Level) bool { return l.DefaultTimeout > 0 })
	if lanes := a.lanes(); lanes > 1 && lanes <= maxOthers+1 && e.goal == 0 && !hasTimeout {
		e.queue = append(e.queue, last)
	}
	a.replay.beginPlay(e.candidates[0].plan)
	return true
}

// noteOutcome takes the outcome of the first candidate in the queue.
func (e *evaluation) noteOutcome(o outcome) {
	i := e.queue[0]
	e.queue = e.queue[1:]
	if i == 0 {
		e.base = o
	}
	c := &e.candidates[i]
	kept := math.Exp(-float64(e.begun-c.at) / float64(forgottenAfter))
	c.with.add(kept, &o)
	c.without.add(kept, &e.base)
	c.replays, c.at = c.replays*kept+1, e.begun
}

// score rates a candidate; less is better. It is the latency, or with a goal the time of the workers,
// as a multiple of that without a wait. Late requests outweigh it.
func (e *evaluation) score(c *candidate) float64 {
	if e.goal == 0 {
		return c.with.latency / c.without.latency
	}
	return c.with.busy/c.without.busy + 1000*max(0, c.with.late/c.with.counted-lateShare)
}

// isEligible says whether a candidate was tried just now, and may be chosen. Nearly full batches
// cannot go one at a time: a small error would make a long queue.
func (e *evaluation) isEligible(c *candidate) bool {
	return c.without.latency > 0 && c.at == e.begun && (!c.oneAtATime || c.with.fill < mostFill*c.replays)
}

// choose takes the best candidate. The plan in force stays unless another is better by more than luck.
func (e *evaluation) choose() {
	was := e.chosen
	if !e.isEligible(&e.candidates[was]) {
		e.chosen = 0
	}
	best := e.score(&e.candidates[e.chosen])
	for i := range e.candidates {
		if c := &e.candidates[i]; i != was && e.isEligible(c) {
			if score := e.score(c) + luck/math.Sqrt(c.replays); score < best {
				e.chosen, best = i, score
			}
		}
	}
	if e.goal > 0 { // step by step: little is known of larger batches
		e.chosen = min(e.chosen, was+3)
	}
}
