// SPDX-License-Identifier: Apache-2.0

package batcher

import (
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/policy"
)

func TestTheWaitsOfAGoalGoFromNoneToAllOfIt(t *testing.T) {
	const goal = Time(50 * time.Millisecond)
	w := waits{goal: goal}
	if w.wait(0) != 0 || Time(w.wait(rungs-1)) != goal {
		t.Errorf("from %v to %v", w.wait(0), w.wait(rungs-1))
	}
	for i := 1; i < rungs; i++ {
		if step := Time(w.wait(i) - w.wait(i-1)); step <= 0 || step > goal/15 {
			t.Errorf("%v follows %v", w.wait(i), w.wait(i-1))
		}
	}
}

// What replays do not see shows in what becomes of requests.
func TestMoreLateRequestsThanMayBeMakeReplaysKeepAShorterTime(t *testing.T) {
	w := waits{goal: 1000}
	ended := func(n, lateOneIn int) {
		for i := range n {
			w.ended(i%lateOneIn == 0)
			if i%200 == 0 {
				w.moveMargin()
			}
		}
	}
	if ended(5000, 20); w.due() > 900 {
		t.Errorf("one in 20 is late, and replays must keep %v of %v", w.due(), w.goal)
	}
	if ended(100_000, 1000); w.due() < 999 {
		t.Errorf("one in 1,000 is late, and replays must keep %v of %v", w.due(), w.goal)
	}
	if ended(100_000, 1); w.due() < 500 { // refused, at many times the capacity
		t.Errorf("all are refused, and replays must keep %v of %v", w.due(), w.goal)
	}
}

func TestOneWrongWaitMovesTheMarginALittle(t *testing.T) {
	w := waits{goal: 1000}
	for range 1000 {
		w.ended(true)
	}
	if w.moveMargin(); w.margin != marginStep {
		t.Errorf("the margin is %v", w.margin)
	}
}

func TestWhatIsTakenAtTheLimitAndLateMakesBatchesLastLonger(t *testing.T) {
	l := newLearner(&policy.Settings{MaxBatchSize: 8, WaitTime: policy.Auto, LatencyGoal: time.Second})
	at := func(late int) float64 { // in a thousand
		for i := range 20_000 {
			l.judge(i%1000 < late)
		}
		return l.safety
	}
	if few, many := at(0), at(100); few > 1.03 || many < 1.2 {
		t.Errorf("batches are taken to last %v times as long where none is late, %v times where a tenth is", few, many)
	}
}

// By what one row takes nearly all would be refused until a larger batch was seen.
func TestWhereOneSizeWasSeenLargerOnesAreHopedToTakeAsLong(t *testing.T) {
	var c costs
	var table costTable
	var hopes [maxOthers + 1][sizeClasses]Time
	c.observe(1, 0, 0, 5000, false)
	table.fill(&c, 32, 0)
	if table.hopes(&c, 32, 0, &hopes); hopes[0][sizeClass(32)] != 5000 {
		t.Errorf("a full batch is hoped to take %v", hopes[0][sizeClass(32)])
	}
	c.observe(4, 0, 0, 6500, false)
	table.fill(&c, 32, 0)
	if table.hopes(&c, 32, 0, &hopes); hopes[0][sizeClass(32)] <= 6500 {
		t.Errorf("a full batch is hoped to take %v, four rows 6,500", hopes[sizeClass(32)])
	}
}

// Nor does what one size takes beside another worker tell what others take there.
func TestWhereOneSizeWasSeenBesideOthersLargerOnesAreHopedToTakeAsLong(t *testing.T) {
	var c costs
	var table costTable
	var hopes [maxOthers + 1][sizeClasses]Time
	c.observe(32, 0, 0, 5500, false)
	c.observe(16, 1, 0, 5250, false)
	table.fill(&c, 32, 1)
	if table.hopes(&c, 32, 1, &hopes); hopes[1][sizeClass(32)] != 5500 {
		t.Errorf("a full batch beside another is hoped to take %v", hopes[1][sizeClass(32)])
	}
}

// A client that is refused and tries again is played as if it had been taken at once.
func TestARequestThatWasRefusedIsRememberedAsItCameFirst(t *testing.T) {
	l := newLearner(&policy.Settings{MaxBatchSize: 8, WaitTime: policy.Auto, LatencyGoal: 10 * time.Millisecond})
	l.waits.closed = true
	at := func(ms int) *Request {
		return &Request{ID: 0, Arrived: Time(ms) * Time(time.Millisecond), Rows: 1, Deadline: Never}
	}
	came := func() time.Duration { return time.Duration(l.latest(0).arrived - l.latest(0).refused) }
	l.arrived(at(1), 0)
	l.answered(0, 0, at(6).Arrived)
	l.wasRefused(at(7))
	l.wasRefused(at(8))
	l.arrived(at(9), 0)
	if r := l.latest(0); came() != 7*time.Millisecond || r.sinceAnswer != Time(time.Millisecond) || r.arrived != at(9).Arrived {
		t.Errorf("%+v", *r)
	}
	l.answered(0, 0, at(14).Arrived)
	if r := l.latest(0); r.latency != at(5).Arrived {
		t.Errorf("a request that was taken at 9 ms and answered at 14 took %v", time.Duration(r.latency))
	}
	l.arrived(at(15), 0)
	if came() != 15*time.Millisecond {
		t.Errorf("the next came at %v", came())
	}
	l.answered(0, 0, at(20).Arrived)
	l.wasRefused(at(21))
	l.arrived(at(1000), 0) // not because of that
	if r := l.latest(0); r.refused != 0 {
		t.Errorf("%+v", *r)
	}
}

// Where no wait keeps the goal, the one that was taken does not make requests late that could
// be in time.
func TestWhereNoWaitKeepsTheGoalABatchGoesOutInTimeForIt(t *testing.T) {
	const goal = Time(20 * time.Millisecond)
	l := newLearner(&policy.Settings{MaxBatchSize: 8, WaitTime: policy.Auto, LatencyGoal: time.Duration(goal)})
	l.workerReady(Worker{ID: 0})
	l.shapes[0].observe(1, 0, 0, 15_000_000, false)
	if got := l.patience(0, Never, 1, 0); got != Never {
		t.Errorf("where a wait keeps the goal a request waits for %v at most", time.Duration(got))
	}
	l.waits.strained = true
	if got := l.patience(0, Never, 1, 0); got < 4_000_000 || got > 5_000_000 {
		t.Errorf("a request waits for %v", time.Duration(got))
	}
}

// The time from the end of a batch to the next dispatch counts only if it was waited for.
func TestTheTurnaroundIsThatOfAWorkerThatIsWaitedFor(t *testing.T) {
	b, err := New(policy.Settings{MaxBatchSize: 1, WaitTime: policy.Auto, LatencyGoal: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	b.ClientJoined(0)
	b.WorkerReady(Worker{ID: 0})
	now, id := Time(1000), RequestID(0)
	arrive := func() {
		if err := b.Arrive(now, Request{ID: id, Rows: 1, Arrived: now, Deadline: Never}); err != nil {
			t.Fatal(err)
		}
		id = (id + 1) % 16
	}
	run := func() { // what is dispatched takes 1000, and is seen 50 later
		d := b.Decide(now)
		if len(d.Dispatches) != 1 {
			t.Fatalf("%d batches", len(d.Dispatches))
		}
		now += 1050
		b.BatchDone(0, d.Dispatches[0].Batch, now-1050, now-50)
	}
	for range 20 { // each finds an idle worker; a broker with nothing queued does not look in between
		arrive()
		run()
		now += 100_000
	}
	if b.learner.turnaround != 0 {
		t.Errorf("an idle worker is taken to be slow by %v", b.learner.turnaround)
	}
	arrive()
	for range 200 { // one always waits
		arrive()
		run()
	}
	if got := b.learner.turnaround; got < 49 || got > 50 {
		t.Errorf("the turnaround is %v, not 50", got)
	}
}

// A turnaround that was long once must not have all refused that would show that it is
// short again.
func TestALongTurnaroundIsForgottenByBatchesThatNobodyWaitedFor(t *testing.T) {
	l := newLearner(&policy.Settings{MaxBatchSize: 8, WaitTime: policy.Auto, LatencyGoal: time.Millisecond})
	l.workerReady(Worker{ID: 0})
	l.turnaround = float64(maxTurnaround)
	if l.handing(Time(time.Millisecond)) > Time(time.Millisecond)/8 {
		t.Errorf("%v of a goal of 1 ms is kept free", l.handing(Time(time.Millisecond)))
	}
	now := Time(0)
	for i := range 1000 {
		now += 1_000_000
		l.arrived(&Request{ID: 0, Arrived: now, Rows: 1}, 0)
		l.dispatched(&Dispatch{Batch: BatchID(i), Requests: []RequestID{0}, Rows: 1, PadTo: 1}, now)
		l.done(0, BatchID(i), now, now+1000)
	}
	if l.turnaround > 1000 {
		t.Errorf("the turnaround is still %v", time.Duration(l.turnaround))
	}
}

// The safety must not keep all away by which it is learned.
func TestASafetyThatHasAllRefusedFalls(t *testing.T) {
	const goal = Time(15 * time.Millisecond)
	l := newLearner(&policy.Settings{MaxBatchSize: 8, WaitTime: policy.Auto, LatencyGoal: time.Duration(goal)})
	l.workerReady(Worker{ID: 0})
	now := Time(1)
	for i := range 40 {
		l.arrived(&Request{ID: 0, Arrived: now, Rows: 1}, 0)
		l.dispatched(&Dispatch{Batch: BatchID(i), Requests: []RequestID{0}, Rows: 1, PadTo: 1}, now)
		now += goal - goal/8
		if i < 39 {
			l.done(0, BatchID(i), now-goal+goal/8, now)
		}
	}
	l.safety = mostSafety
	for range 2000 { // in two seconds
		now += Time(time.Millisecond)
		if r := (Request{ID: 1, Arrived: now, Rows: 1, Deadline: Never}); !l.late(now, &r, 1, 0, 1) {
			return
		}
	}
	t.Errorf("all are refused, and the safety is %v", l.safety)
}
