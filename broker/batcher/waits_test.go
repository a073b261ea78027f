// SPDX-License-Identifier: Apache-2.0

package batcher

import (
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/policy"
)

// found is a ladder on which these means and tails were found, as multiples of no wait's.
func found(closed bool, latencies map[int][2]float64) *waits {
	w := &waits{closed: closed, evaluation: 1}
	for i, x := range latencies {
		w.rungs[i] = rung{with: outcome{sum: x[0], n: 100}, without: outcome{sum: 1, n: 100}, tail: x[1], replays: 100, evaluation: 1}
	}
	w.choose()
	return w
}

func TestAWaitAtTheEdgeMustBeBetterByFar(t *testing.T) {
	usual := roundAbove(Time(5 * time.Millisecond))
	for _, c := range []struct {
		name   string
		closed bool
		at     int // the other wait that was tried
		mean   float64
		want   int
	}{
		{"a step below, a little better: the edge", false, usual - 1, 0.55, usual},
		{"two steps below", false, usual - 2, 0.55, usual},
		{"by far better", false, usual - 1, 0.45, usual - 1},
		{"three steps below is another usual figure", false, usual - 3, 0.55, usual - 3},
		{"a step above, a little better", false, usual + 1, 0.55, usual},
		{"two steps above", false, usual + 2, 0.55, usual},
		{"above it something better is enough", false, usual + 1, 0.52, usual + 1},
		{"clients that wait for their answers keep themselves apart", true, usual - 1, 0.55, usual - 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := found(c.closed, map[int][2]float64{0: {1, 1}, usual: {0.6, 0.6}, c.at: {c.mean, 0.6}})
			if w.taken != c.want {
				t.Fatalf("took %v, want %v", rungWait(w.taken), rungWait(c.want))
			}
		})
	}
}

// What full batches are taken to last is news when the first requests come, because it was a
// guess until then. Later it is what workers that share make of it: news several times a
// second would have every choice rest on one replay.
func TestWhatFullBatchesTakeIsNewsAtTheStartOrByFar(t *testing.T) {
	for _, c := range []struct {
		full    Time
		goal    Time
		starts  bool
		changed bool
		want    bool
	}{
		{full: 500, starts: true, want: true},
		{full: 500},
		{full: 300, want: true},
		{full: 500, goal: Time(time.Second), want: true},
		{full: 1050, starts: true},
		{full: 500, changed: true, want: true},
	} {
		w := waits{goal: c.goal, starts: true}
		w.plan(1, 1, Time(time.Millisecond), 100, Time(time.Second), 1000, false)
		w.starts = c.starts
		if news := w.plan(2, 1, Time(time.Millisecond), 100, Time(time.Second), c.full, c.changed); news != c.want {
			t.Errorf("%+v: news %v", c, news)
		}
	}
}

func TestAnotherBatchSizeForgetsWhatWaitsDid(t *testing.T) {
	b, err := New(policy.Settings{MaxBatchSize: 64, WaitTime: policy.Auto})
	if err != nil {
		t.Fatal(err)
	}
	l := b.learner
	l.waits = *found(false, map[int][2]float64{0: {1, 1}, roundAbove(Time(time.Millisecond)): {0.5, 0.5}})
	same := l.settings.Clone()
	if l.setPolicy(&same); l.waits.inForce() != Time(time.Millisecond) {
		t.Fatalf("the same policy, and %v instead of 1 ms", l.waits.inForce())
	}
	less := l.settings.Clone()
	less.MaxBatchSize = 8
	if l.setPolicy(&less); l.waits.inForce() != 0 || l.waits.lately(0) {
		t.Fatalf("batches of 8, and still %v of batches of 64", l.waits.inForce())
	}
}

// After a leap of what batches take, replays that tell of another time for requests without a
// wait end what was found with other waits a moment ago; without one they only add to it.
func TestAfterALeapReplaysThatDifferForgetWhatWasFound(t *testing.T) {
	outcomeOf := func(mean Time) *outcome {
		o := &outcome{n: 1}
		for range 100 {
			o.sum += float64(mean)
			o.latencies.note(mean)
		}
		return o
	}
	other := roundAbove(Time(5 * time.Millisecond))
	for _, c := range []struct {
		unsettled bool
		mean      time.Duration // 10 ms before
		forgotten bool
	}{
		{true, 40 * time.Millisecond, true},
		{true, 4 * time.Millisecond, true},
		{true, 15 * time.Millisecond, false},
		{false, 40 * time.Millisecond, false},
	} {
		w := waits{unsettled: c.unsettled}
		plan := func(now Time) {
			w.plan(now, 1, Time(20*time.Millisecond), 1000, Time(time.Second), 1000, false)
		}
		plan(1)
		for w.next() >= 0 {
			w.tried(outcomeOf(Time(10 * time.Millisecond)))
		}
		plan(2)
		few := len(w.queue)
		w.tried(outcomeOf(Time(c.mean)))
		if forgotten := w.rungs[other].replays < 0.5; forgotten != c.forgotten || forgotten != (len(w.queue) > few) {
			t.Errorf("%+v: %v replays of another wait count, %d instead of %d are tried", c, w.rungs[other].replays, len(w.queue), few)
		}
	}
}
