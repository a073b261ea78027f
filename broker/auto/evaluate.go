// SPDX-License-Identifier: Apache-2.0

package auto

import (
	"math"
	"slices"
	"time"

	"github.com/ringbatch/ringbatch/broker/batcher"
)

// usualWaits are the waits that are tried without a latency goal.
var usualWaits = []time.Duration{
	10 * time.Microsecond, 20 * time.Microsecond, 50 * time.Microsecond, 100 * time.Microsecond, 250 * time.Microsecond,
	500 * time.Microsecond, time.Millisecond, 2 * time.Millisecond, 5 * time.Millisecond, 10 * time.Millisecond,
	20 * time.Millisecond, 50 * time.Millisecond, 100 * time.Millisecond, 200 * time.Millisecond,
}

// evaluation replays the latest requests with several candidates, and chooses one.
type evaluation struct {
	goal       Time        // latency_goal; 0: none
	candidates []candidate // no wait first, then longer and longer ones, then one at a time
	chosen     int
	closed     bool // clients send when they are answered

	queue   []int // candidates that the present evaluation has yet to play
	number  int   // of evaluations so far
	begun   Time  // when the last began
	begunAt int   // history.count then
	turn    int   // the candidate that was tried last in turn
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
	with, without float64 // score of the requests, and of the same ones without a wait
	busy, idle    float64 // time of the workers, likewise
	late          float64 // share of requests that missed the goal, summed
	replays       float64
	fill          float64 // of its batches, at the last replay
	at            Time    // of the last replay
	number        int     // of that evaluation
}

func newEvaluation(goal Time) evaluation {
	e := evaluation{goal: goal, candidates: make([]candidate, 1), begun: -batcher.Never / 2}
	for i, wait := range usualWaits {
		if goal > 0 { // shares of it, closer together where they are short
			part := float64(i+1) / float64(len(usualWaits))
			wait = time.Duration(part * part * float64(goal))
		}
		e.candidates = append(e.candidates, candidate{plan: plan{wait: Time(wait)}})
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
	e.earn(now)
	if len(e.queue) == 0 && !a.begin(now) {
		return
	}
	for ; e.credit >= 1; e.credit-- {
		if a.replay.step() {
			continue
		}
		e.note(a.replay.outcome())
		if len(e.queue) == 0 {
			e.choose()
			a.plan = e.candidates[e.chosen].plan
			return
		}
		a.replay.play(e.candidates[e.queue[0]].plan)
	}
}

// earn adds the steps that may be taken since the last time.
func (e *evaluation) earn(now Time) {
	steps := float64(now-e.lastNow) / float64(stepEach)
	if now < e.hurryUntil {
		steps *= hurry
	}
	e.credit = min(e.credit+steps, maxSteps)
	e.lastNow = now
}

// begin begins an evaluation, if there is enough to learn from: a quarter of the requests
// are new, or the machine has changed.
func (a *Advisor) begin(now Time) bool {
	e := &a.evaluation
	changes, known := a.changes()
	n := a.history.window(now, Time(a.quickest))
	fresh := a.history.count - e.begunAt
	if !known || n < fewRequests || e.credit < 1 {
		return false
	}
	if changes == e.changes && fresh < max(n/4, fewRequests/2) && (fresh == 0 || now < e.begun+remembered/4) {
		return false
	}
	e.credit -= float64(n) / 4 // for loading them
	if a.replay == nil {
		a.replay = newReplay(a)
	}
	a.replay.load(a, n)
	e.closed = a.replay.closed
	rate := float64(n) / float64(max(1, now-a.history.latest(n-1).arrived))
	if changes != e.changes || rate > 3*e.rate || 3*rate < e.rate {
		a.startAgain(now)
		e.rate = rate
	}
	e.rate += (rate - e.rate) / 4
	e.changes = changes
	e.begun, e.begunAt = now, a.history.count
	e.number++
	e.enqueue(a, n, now)
	a.replay.play(e.candidates[0].plan)
	return true
}

// startAgain forgets what was found under another load, or at other costs. Everything is
// tried again soon. Whether one batch at a time can do all the work is unknown.
func (a *Advisor) startAgain(now Time) {
	e := &a.evaluation
	for i := range e.candidates {
		e.candidates[i] = candidate{plan: e.candidates[i].plan}
	}
	if e.candidates[e.chosen].oneAtATime {
		e.chosen = 0
		a.plan = e.candidates[0].plan
	}
	e.hurryUntil = now + remembered
}

// changes counts the changes of all costs, and says whether any cost is known.
func (a *Advisor) changes() (n int, known bool) {
	for i := range a.shapes {
		n += a.shapes[i].changes
		known = known || a.shapes[i].batches > 0
	}
	return n, known
}

// enqueue chooses the candidates of an evaluation of n requests: no wait, the chosen
// one and its neighbours, one batch at a time, and some of the others in turn.
func (e *evaluation) enqueue(a *Advisor, n int, now Time) {
	serial := len(e.candidates) - 1
	e.queue = append(e.queue[:0], 0)
	add := func(i int) {
		if i > 0 && i < serial && !slices.Contains(e.queue, i) {
			e.queue = append(e.queue, i)
		}
	}
	if e.chosen != serial {
		for i := e.chosen - 1; i <= e.chosen+1; i++ {
			add(i)
		}
	}
	if a.maySerialize() {
		e.queue = append(e.queue, serial)
	} else if e.chosen == serial {
		e.chosen = 0
	}
	most := 1
	for most < serial-1 && (e.goal > 0 || float64(e.candidates[most].wait) < 2.5*a.took) {
		most++
	}
	some := max(2, 1024/n)
	if now < e.hurryUntil {
		some = most
	}
	for range min(some, most) {
		e.turn = e.turn%most + 1
		add(e.turn)
	}
}

// maySerialize says whether batches could go one at a time: several could run at once,
// no level has a queue timeout, which replays do not know, and there is no latency goal.
func (a *Advisor) maySerialize() bool {
	for i := range a.settings.Levels {
		if a.settings.Levels[i].DefaultTimeout > 0 {
			return false
		}
	}
	lanes := a.lanes()
	return lanes > 1 && lanes <= maxOthers+1 && a.evaluation.goal == 0
}

// note takes the outcome of the first candidate in the queue.
func (e *evaluation) note(o outcome) {
	i := e.queue[0]
	e.queue = e.queue[1:]
	if i == 0 {
		e.base = o
	}
	c := &e.candidates[i]
	kept := math.Exp(-float64(e.begun-c.at) / float64(forgottenAfter))
	c.with, c.without = c.with*kept+o.score(), c.without*kept+e.base.score()
	c.busy, c.idle = c.busy*kept+float64(o.busy), c.idle*kept+float64(e.base.busy)
	c.late, c.replays = c.late*kept+o.lateShare(), c.replays*kept+1
	c.fill, c.at, c.number = o.fill, e.begun, e.number
}

// ratio is the score with a candidate as a multiple of that without a wait.
func (c *candidate) ratio() float64 { return c.with / c.without }

// isRecent says whether a candidate was tried lately, and may be chosen.
func (e *evaluation) isRecent(c *candidate) bool {
	return c.without > 0 && e.number-c.number < 6 && (!c.oneAtATime || c.fill < serialFill)
}

// choose takes the best candidate. What is in force stays unless another is better by
// more than luck.
func (e *evaluation) choose() {
	if e.goal > 0 {
		e.chooseForGoal()
		return
	}
	if !e.isRecent(&e.candidates[e.chosen]) {
		e.chosen = 0
	}
	best := e.candidates[e.chosen].ratio()
	for i := range e.candidates {
		if c := &e.candidates[i]; i != e.chosen && e.isRecent(c) {
			ratio := c.ratio() + luck/math.Sqrt(c.replays)
			if c.oneAtATime {
				ratio += luck
			}
			if ratio < best {
				e.chosen, best = i, ratio
			}
		}
	}
}

// chooseForGoal takes, of the waits that keep the goal, the one that keeps the workers busy
// for the least time; if no wait keeps it, the one with the fewest late requests. The wait
// grows step by step, because little is known of larger batches.
func (e *evaluation) chooseForGoal() {
	best, late, busy := 0, math.Inf(1), math.Inf(1)
	for i := range e.candidates {
		c := &e.candidates[i]
		if !e.isRecent(c) {
			continue
		}
		share, time := max(lateShare, c.late/c.replays), c.busy/c.idle
		if share < late || share == late && time < busy {
			best, late, busy = i, share, time
		}
	}
	e.chosen = min(best, e.chosen+3)
}
