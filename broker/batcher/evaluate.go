// SPDX-License-Identifier: Apache-2.0

package batcher

import "time"

// The replay may take this share of the time, and so many steps at once.
const (
	stepEvery     = float64(8 * time.Microsecond) // a step takes about 0.15 µs: 2 %
	maxSteps      = 64.0
	hurry         = 4 // times as often for a second after news, and as many at once after a step of load or cost
	evaluateEach  = Time(10 * time.Millisecond)
	remembered    = Time(time.Second)
	shortestPause = remembered / 8
	leapFor       = 2 * remembered // what batches take counts as new, after it became twice as much or half
	fewRecords    = 16
	someRecords   = 384
	// windowBatches is how many of the quickest batches a window lasts at least, if the
	// requests of that time can be remembered: in a shorter one waits differ less than
	// they do in truth.
	windowBatches = 64
	// For startsFor from the first request on, a choice is made in haste: from windows of
	// startBatches, again as soon as one in newAtStart of their requests is new instead of one
	// in newLater, and with startHurry times as many steps. A quick model has some ten thousand
	// requests in that time, and without a wait they might all be slow.
	startsFor    = Time(50 * time.Millisecond)
	startRuns    = 64 // or as many of the quickest batches, if that is longer, up to startAtMost
	startAtMost  = Time(2 * time.Second)
	startBatches = 16
	startHurry   = 16
	newAtStart   = 8
	newLater     = 2
	// evaluateAnyway is when a few new requests are enough: after a busy time the
	// many that are usual would take long to come.
	evaluateAnyway = remembered / 4
)

// step goes on with the replay for as long as may be now, and begins a new one
// when it is time.
func (l *learner) step(now Time) {
	if !l.auto {
		return
	}
	every, most, each := stepEvery, maxSteps, evaluateEach
	switch {
	case l.starts(now):
		every /= startHurry
		each = min(each, startBatches*l.quickest())
	case now < l.hurryUntil:
		every /= hurry
	}
	if now < l.stepUntil {
		most *= hurry
	}
	l.credit = min(l.credit+float64(now-l.lastNow)/every, most)
	l.lastNow = now
	if l.replay == nil || !l.replay.running {
		if now < l.begun+each || l.count-l.begunAt < fewRecords/2 {
			return
		}
		n := l.windowSize(now)
		if n < fewRecords || !l.shapes[0].known() || !l.enoughAreNew(now, n) {
			return
		}
		l.begin(now, n)
	}
	for ; l.credit >= 1; l.credit-- {
		if l.replay.step() {
			continue
		}
		if l.replay.moves != l.shapes[0].moves && !l.anew { // batches take another time since: begin anew, at once
			l.begun, l.begunAt, l.anew = now-evaluateAnyway, l.count-fewRecords, true
			return
		}
		result := l.replay.result()
		l.waits.tried(&result)
		if !l.replay.again(l.waits.next()) {
			l.waits.choose()
			l.anew = false
			l.enforce()
			return
		}
	}
}

// enoughAreNew says whether enough of the latest n requests came since the last choice to make another.
func (l *learner) enoughAreNew(now Time, n int) bool {
	part := newLater
	if l.starts(now) {
		part = newAtStart
	}
	return l.count-l.begunAt >= min(n, someRecords)/part || now >= l.begun+evaluateAnyway
}

// enforce has requests wait as was chosen from now on.
func (l *learner) enforce() { l.wait, l.apart = l.waits.inForce(), l.waits.taken == apart }

// windowSize is how many of the latest requests are played again: those of the
// last second, some in any case, and at least enough for a few batches.
func (l *learner) windowSize(now Time) int {
	batches := Time(windowBatches)
	if l.starts(now) {
		batches = startBatches
	}
	now = l.clock(now)
	have := min(l.count-l.changed, maxRecords)
	n := 0
	for n < have && (n < fewRecords || l.latest(n).clock() > now-remembered) {
		n++
		if n >= someRecords && n%64 == 0 {
			span := now - l.latest(n-1).clock()
			if span > batches*l.quickest() {
				break
			}
		}
	}
	return n
}

// starts says whether the first requests have only just come.
func (l *learner) starts(now Time) bool {
	return now < l.firstAt+max(startsFor, min(startRuns*l.quickest(), startAtMost))
}

// latest is the i-th last record, from 0.
func (l *learner) latest(i int) *record { return &l.records[(l.count-1-i)%maxRecords] }

// clock is when a request came, by the learner's clock.
func (r *record) clock() Time { return r.arrived - r.skipped }

// quickest is about what the smallest batch takes.
func (l *learner) quickest() Time { return Time(max(1, l.least)) }

func (l *learner) begin(now Time, n int) {
	l.begun, l.begunAt = now, l.count
	changed := l.findChange(n)
	if changed {
		n = l.count - l.changed
	}
	if l.replay == nil {
		l.replay = newReplay(l)
	}
	moved := l.replay.moves != l.shapes[0].moves
	if changed || moved {
		l.stepUntil = now + remembered
	}
	if moved { // how full batches are from now on is not known
		l.waits.leaveApart()
		l.enforce()
	}
	if l.replay.leaps != l.shapes[0].leaps {
		l.leapUntil = now + leapFor
	}
	l.replay.load(n)
	l.waits.closed, l.waits.unsettled, l.waits.starts = l.replay.closed, now < l.leapUntil, l.starts(now)
	l.waits.mayGoApart = l.replay.mayGoApart(&l.settings) && (!l.waits.unsettled || l.replay.leavesRoom())
	l.refreshTable(l.waits.goal > 0)
	clock := l.clock(now)
	if l.waits.plan(clock, l.quickest()/64, l.longest(), n, clock-l.latest(n-1).clock(), l.expected(l.settings.MaxBatchSize), changed) {
		l.hurryUntil = now + remembered
	}
	l.replay.again(l.waits.next())
}

// longest is the longest wait that is worth a try.
func (l *learner) longest() Time {
	if l.waits.goal > 0 {
		return l.waits.goal
	}
	return Time(2.5 * max(l.took, l.least))
}
