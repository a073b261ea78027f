// SPDX-License-Identifier: Apache-2.0

package batcher

import (
	"math"
	"slices"
	"time"
)

// waits is the ladder of waits that replays try, and what came of each. Rung 0
// is no wait; then come the round figures that people set, and two steps between
// each and the next.
type waits struct {
	rungs      [rungs + 1]rung // the last is apart
	taken      int             // the rung in force
	round      int             // the best of the usual figures
	queue      []int           // rungs of the evaluation in progress
	least      int             // the shortest and the longest round figure that are worth a try in it
	most       int
	at         Time // when it began
	evaluation int  // its number
	turn       int
	base       outcome // of no wait, in it
	rate       float64 // of requests, lately
	high       Time    // lately
	goal       Time    // latency_goal; 0: none
	margin     float64 // share of the goal that replays must leave free
	strained   bool    // no wait was found that keeps it
	missed     float64 // requests that were late or refused since it was moved, less those that may be
	full       Time    // what a full batch was taken to last
	closed     bool    // clients send when they have their answer
	mayGoApart bool    // batches may
	unsettled  bool    // batches came to take twice as long, or half, lately
	starts     bool    // the first requests have only just come
}

// rung is one wait: what became of requests with it, and of the same ones
// without any wait, in all the last replays together.
type rung struct {
	with, without outcome
	tail          float64 // of the former as a multiple of the latter's
	replays       float64 // how many
	evaluation    int     // that tried it last
	at            Time    // when that began
}

// outcome is what became of requests.
type outcome struct {
	sum       float64 // of their latencies
	latencies latencies
	busy      float64 // what the workers spent on all of them
	filled    float64 // share of the rows that its batches could have had
	late      float64 // of those that count, the share that took longer than replays may
	over      float64 // and longer than the goal
	n         float64 // replays
}

func (o *outcome) add(kept float64, x *outcome) {
	o.sum = o.sum*kept + x.sum
	o.latencies.add(float32(kept), &x.latencies)
	o.busy, o.filled, o.late, o.over, o.n = o.busy*kept+x.busy, o.filled*kept+x.filled, o.late*kept+x.late, o.over*kept+x.over, o.n*kept+x.n
}

// mean is what a request took; 0 if there was none.
func (o *outcome) mean() float64 {
	if n := o.latencies.count(); n > 0 {
		return o.sum / n
	}
	return 0
}

// differs says whether one is more than so many times the other.
func differs(a, b, by float64) bool { return max(a, b) > by*min(a, b) }

// roundWaits are the round figures.
var roundWaits = [...]time.Duration{
	10 * time.Microsecond, 20 * time.Microsecond, 50 * time.Microsecond, 100 * time.Microsecond, 250 * time.Microsecond, 500 * time.Microsecond,
	time.Millisecond, 2 * time.Millisecond, 5 * time.Millisecond, 10 * time.Millisecond, 20 * time.Millisecond, 50 * time.Millisecond,
	100 * time.Millisecond, 200 * time.Millisecond,
}

const (
	rungs = 1 + 3*len(roundWaits) - 2
	// apart is no rung of the ladder: batches go one after the other (apart.go). Workers
	// that share a GPU are about as quick then, and each request is answered sooner than
	// if all were computed at the same time.
	apart = rungs
	// forget is the time after which what was found counts for 1/e.
	forget = float64(1500 * time.Millisecond)
	// luck is how far the mean of one replay may be off.
	luck = 0.03
	// worseTail and worseMean are how much worse the one may be for a gain in
	// the other; tailWeight is what a part of the tail counts beside one of the mean.
	worseTail, worseMean = 0.04, 0.01
	tailWeight           = 0.3
	// How much better a wait just below or above the best of the usual figures must be.
	justBelow, justAbove = 0.15, 0.1
	// How much better the mean must be before batches go apart, and how full they may be on
	// average: where one at a time can hardly do all the work, a small error makes a long queue.
	apartGain, apartFilled = 0.03, 0.6
	// At the start a window has in it what those before had, and the first of them were of a
	// time when workers were idle: what those tell counts for half with each new one. So more
	// round figures are tried in each, or what is known of some would be of then.
	keptAtStart, someAtStart = 0.5, 5
	// What a wait counts as worse, at most, where a little shorter one is far worse.
	atTheEdge = 0.1
	// The shortest wait, and the longest, that people set.
	leastUsual, mostUsual = 250 * time.Microsecond, 20 * time.Millisecond
)

// goalWait is the wait of a rung where there is a goal: a share of it, in steps that
// are small at either end. A short wait may be all that the goal allows, and where
// requests are few what fills batches is a wait just below it.
func goalWait(i int, goal Time) time.Duration {
	x := float64(i) / float64(rungs-1)
	return time.Duration(x * x * float64(goal))
}

// wait is that of a rung.
func (w *waits) wait(i int) time.Duration {
	switch {
	case i == apart:
		return 0
	case w.goal > 0:
		return goalWait(i, w.goal)
	}
	return rungWait(i)
}

func rungWait(i int) time.Duration {
	if i == 0 {
		return 0
	}
	k, part := (i-1)/3, (i-1)%3
	low := float64(roundWaits[k])
	if part == 0 {
		return roundWaits[k]
	}
	return time.Duration(low * math.Pow(float64(roundWaits[k+1])/low, float64(part)/3))
}

// isUsual says whether a wait is one of those that people set: none, or a round
// figure from 250 µs to 20 ms.
func isUsual(i int) bool {
	return i == 0 || i != apart && i%3 == 1 && rungWait(i) >= leastUsual && rungWait(i) <= mostUsual
}

// roundAbove is the first round rung that is not shorter than a wait.
func roundAbove(wait Time) int {
	for k, w := range roundWaits {
		if Time(w) >= wait {
			return 1 + 3*k
		}
	}
	return rungs - 1
}

// inForce is the wait that was chosen last.
func (w *waits) inForce() Time { return Time(w.wait(w.taken)) }

// plan chooses what to try with so many requests of so long a time: no wait,
// what is in force and its neighbours, and in turn the round figures between
// low and high. It says whether the load is another than before, or what a full batch is
// taken to last (full): by a little when the first requests come (starts), because that was
// a guess until then, or where there is a goal; otherwise only by far, because it is as
// unsteady as workers that share are.
// With news, what was found before hardly counts, and all rungs come at once.
func (w *waits) plan(now, low, high Time, requests int, span, full Time, changed bool) (news bool) {
	rate := float64(requests) / float64(max(1, span))
	unsteady := 3.0
	if w.starts || w.goal > 0 {
		unsteady = 8.0 / 7
	}
	news = changed || differs(w.rate, rate, 4) || differs(float64(w.high), float64(high), 2) || differs(float64(w.full), float64(full), unsteady)
	if news {
		w.forgetAll()
		w.rate, w.high, w.full = rate, high, full
	}
	w.rate += (rate - w.rate) / 4
	w.high += (high - w.high) / 4
	w.at = now
	w.evaluation++
	w.queue = append(w.queue[:0], 0)
	if !w.mayGoApart {
		w.leaveApart()
	}
	for i := w.taken - 1; w.taken > 0 && w.taken != apart && i <= w.taken+1; i++ {
		w.add(i)
	}
	if w.mayGoApart && w.goal == 0 {
		w.queue = append(w.queue, apart)
	}
	w.least, w.most = roundAbove(low), roundAbove(max(high, Time(leastUsual)))
	if w.goal > 0 {
		w.least, w.most = 1, rungs-1
	}
	w.add(w.round)
	some := max(2, 1024/requests)
	switch {
	case news:
		some = rungs
	case w.starts:
		some = max(some, someAtStart)
	}
	w.addInTurn(some)
	return news
}

// forgetAll has what was found hardly count any more.
func (w *waits) forgetAll() {
	for i := range w.rungs {
		r := &w.rungs[i]
		r.with.add(0.01, &outcome{})
		r.without.add(0.01, &outcome{})
		r.replays *= 0.01
	}
}

// addInTurn has so many of the round figures tried, those whose turn it is.
func (w *waits) addInTurn(some int) {
	steps := (w.most-w.least)/3 + 1
	for range min(some, steps) {
		w.turn++
		w.add(w.least + 3*(w.turn%steps))
	}
}

// leaveApart has batches not go apart until that is chosen again.
func (w *waits) leaveApart() {
	if w.taken == apart {
		w.taken = w.round
	}
}

func (w *waits) add(i int) {
	if i > 0 && i < rungs && !slices.Contains(w.queue, i) {
		w.queue = append(w.queue, i)
	}
}

// next is the rung to try, or -1.
func (w *waits) next() int {
	for _, i := range w.queue {
		if w.rungs[i].evaluation != w.evaluation {
			return i
		}
	}
	return -1
}

// tried takes the outcome of the rung that next gave.
func (w *waits) tried(o *outcome) {
	i := w.next()
	if i == 0 {
		// After batches came to take twice as long, it is a while until that of all sizes is
		// known. Where requests without a wait take another time than a moment ago, what was
		// found then was wrong.
		if w.unsettled && differs(o.mean(), w.rungs[0].with.mean(), 2) {
			w.forgetAll()
			w.addInTurn(rungs)
		}
		w.base = *o
	}
	r := &w.rungs[i]
	kept := math.Exp(-float64(max(0, w.at-r.at)) / forget)
	if w.starts {
		kept *= keptAtStart
	}
	r.evaluation, r.at = w.evaluation, w.at
	r.replays = r.replays*kept + 1
	r.with.add(kept, o)
	r.without.add(kept, &w.base)
	r.tail = r.with.latencies.tail() / r.without.latencies.tail()
}

// choose takes the wait that does least harm against the best of the usual
// figures: a mean that is worse by 3 % harms as much as a tail that is worse by
// 10 %. A gain in the one is not bought with much of the other.
//
// The mean of a few replays is partly luck, and the best of many such means
// mostly is: so what is in force goes only for one that is better by more than
// that.
func (w *waits) choose() {
	if w.goal > 0 {
		w.chooseForGoal()
		return
	}
	best := w.mean(w.round)
	for i := range w.rungs {
		if isUsual(i) && w.lately(i) && i != w.round {
			if mean := w.mean(i) * (1 + w.doubt(i)); mean < best {
				w.round, best = i, mean
			}
		}
	}
	if !w.lately(apart) {
		w.leaveApart()
	}
	if w.harm(w.taken) > w.harm(w.round) {
		w.taken = w.round
	}
	best = w.harm(w.taken)
	for i := range w.rungs {
		if w.lately(i) && i != w.taken {
			if harm := w.harm(i) + w.doubt(i); harm < best {
				w.taken, best = i, harm
			}
		}
	}
}

// harm is how much worse a wait is than the best of the usual figures, as a
// share of the mean.
//
// Where waiting pays because it keeps workers apart, the shortest wait that just does
// so has the best mean, and is at the edge: now and then it fails to, for longer
// than a replay lasts, and the tail that no replay saw is what the next longer
// wait avoids. So the two steps below the best usual figure must be better by far. Those
// above, too: on a GPU the mean rises at once beyond the right wait, and replays do not see
// that. In a closed loop a wait that is just long enough for all to come back is at an
// edge, too, and a longer one costs nothing.
//
// Before batches go apart their mean must be better by some per cent, and a better tail does
// not count: replays make too much of it. Once they do they stay so while that is no worse:
// with a wait instead, batches may run side by side and slowly for long, because the first did.
func (w *waits) harm(i int) float64 {
	mean, tail := w.mean(i)/w.mean(w.round)-1, w.tail(i)/w.tail(w.round)-1
	if i == apart && w.taken != apart {
		mean, tail = mean+apartGain, max(0, tail)
	}
	harm := mean + tailWeight*tail
	harm += 4 * max(0, mean-worseMean)
	harm += max(0, tail-worseTail)
	switch steps := i - w.round; {
	case w.closed:
	case steps == -1 || steps == -2:
		harm += justBelow
	case steps == 1 || steps == 2:
		harm += justAbove
	}
	if w.closed && i > 1 && i != apart && w.lately(i-1) {
		harm += min(tailWeight*max(0, w.mean(i-1)/w.mean(i)-1), atTheEdge)
	}
	return harm
}

// goalShare of the requests may take longer than the goal: less than one in a
// hundred, because what was is not quite what will be.
const goalShare = 0.006

const (
	// marginGain is what one request that was late, or refused, adds to the margin. As
	// many take it away again as there are for each that may be late.
	marginGain = 0.0015
	marginStep = 0.02 // at once: a wait that was wrong makes many late before it is left
	mostMargin = 0.4
	// goalSteps is how many rungs the wait grows at once. At first little is known of
	// larger batches, and what they take is seen on the way.
	goalSteps = 10
)

// ended learns from what became of a request. Replays do not see all that makes
// requests late: so they must keep a shorter time than the goal where more are than
// may be.
func (w *waits) ended(missed bool) {
	if missed {
		w.missed++
	}
	w.missed -= goalShare
}

// moveMargin is by what became of the requests since the last time.
func (w *waits) moveMargin() {
	move := max(-marginStep, min(marginGain*w.missed, marginStep))
	w.margin = max(0, min(w.margin+move, mostMargin))
	w.missed = 0
}

// due is the time that replays must keep.
func (w *waits) due() Time { return Time((1 - w.margin) * float64(w.goal)) }

// chooseForGoal takes, of the waits with which p99 stays within the goal, the one
// that leaves the workers most time for others. If there is none it takes the one
// with which the fewest take longer than the goal.
func (w *waits) chooseForGoal() {
	best, bestBusy := -1, 0.0
	nearest := 0
	for i := range w.rungs {
		if !w.lately(i) {
			continue
		}
		late, busy := w.lateShare(i), w.rungs[i].with.busy/w.rungs[i].without.busy
		if late <= goalShare && (best < 0 || busy < bestBusy) {
			best, bestBusy = i, busy
		}
		if w.overShare(i) < w.overShare(nearest) {
			nearest = i
		}
	}
	if w.strained = best < 0; w.strained {
		best = nearest
	}
	best = min(best, w.taken+goalSteps)
	w.moveMargin()
	w.taken, w.round = best, best
}

func (w *waits) lateShare(i int) float64 { return w.rungs[i].with.late / w.rungs[i].with.n }

// overShare goes by the goal itself: if no wait keeps the shorter time, the margin is
// larger than it can be, and a wait that most requests hardly keep is no better for it.
func (w *waits) overShare(i int) float64 { return w.rungs[i].with.over / w.rungs[i].with.n }

// mean is the mean latency with a wait as a multiple of that without any.
func (w *waits) mean(i int) float64 { return w.rungs[i].with.sum / w.rungs[i].without.sum }

// tail is about the same for p99.
func (w *waits) tail(i int) float64 { return w.rungs[i].tail }

// doubt is by how much better a mean must be.
func (w *waits) doubt(i int) float64 { return luck / math.Sqrt(w.rungs[i].replays) }

func (w *waits) lately(i int) bool {
	r := &w.rungs[i]
	return r.without.sum > 0 && w.evaluation-r.evaluation < 6 && (i != apart || w.mayGoApart && r.with.filled < apartFilled*r.with.n)
}
