// SPDX-License-Identifier: Apache-2.0

package batcher

import (
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/policy"
)

// apartWorld is a batcher whose batches go apart, with two workers, the first of which
// runs a batch that should take 10 ms; those before it did.
func apartWorld(t *testing.T) (b *Batcher, first *Dispatch, now Time) {
	t.Helper()
	b, err := New(policy.Settings{MaxBatchSize: 4, WaitTime: policy.Auto})
	if err != nil {
		t.Fatal(err)
	}
	b.ClientJoined(9) // or nobody could join
	b.WorkerReady(Worker{ID: 0})
	b.WorkerReady(Worker{ID: 1})
	for range 2 * youngPoint {
		now += Time(time.Millisecond)
		d := arriveAt(t, b, now, Never)
		now += Time(10 * time.Millisecond)
		b.BatchDone(d.Worker, d.Batch, now-Time(10*time.Millisecond), now)
		b.Decide(now)
	}
	b.learner.apart = true
	first = arriveAt(t, b, now, Never)
	return b, first, now
}

// arriveAt has a request of one row come, and is the batch that goes out then, or nil.
func arriveAt(t *testing.T, b *Batcher, now, deadline Time) *Dispatch {
	t.Helper()
	id := RequestID(0)
	for b.stateOf(id) != unknown {
		id++
	}
	if err := b.Arrive(now, Request{ID: id, Client: ClientID(id), Rows: 1, Level: DefaultLevel, Arrived: now, Deadline: deadline}); err != nil {
		t.Fatal(err)
	}
	d := b.Decide(now)
	if len(d.Dispatches) == 0 {
		return nil
	}
	out := d.Dispatches[0]
	return &out
}

func TestWhatIsNotFullIsHeldBackUntilNoBatchRuns(t *testing.T) {
	b, first, now := apartWorld(t)
	if first == nil {
		t.Fatal("nothing runs, and a request is held back")
	}
	now += Time(time.Millisecond)
	if d := arriveAt(t, b, now, Never); d != nil {
		t.Fatalf("%+v runs beside another batch", d)
	}
	b.BatchDone(first.Worker, first.Batch, now-Time(time.Millisecond), now)
	if d := b.Decide(now); len(d.Dispatches) != 1 {
		t.Errorf("nothing runs any more, and %d batches went out", len(d.Dispatches))
	}
}

func TestAFullBatchIsNotHeldBack(t *testing.T) {
	b, _, now := apartWorld(t)
	for range 3 {
		if d := arriveAt(t, b, now, Never); d != nil {
			t.Fatalf("%+v is not full", d)
		}
	}
	if d := arriveAt(t, b, now, Never); d == nil || d.Why != Full {
		t.Errorf("with four of four rows %+v goes out", d)
	}
}

func TestNothingIsHeldBackForAWorkerThatHangs(t *testing.T) {
	b, _, now := apartWorld(t)
	if d := arriveAt(t, b, now, Never); d != nil {
		t.Fatalf("%+v runs beside another batch", d)
	}
	wake := b.Decide(now).Wake
	if wake < now+Time(20*time.Millisecond) || wake > now+Time(60*time.Millisecond) {
		t.Fatalf("a batch of 10 ms is waited for for %v", time.Duration(wake-now))
	}
	if d := b.Decide(wake); len(d.Dispatches) != 1 {
		t.Errorf("%d batches go out when another is overdue", len(d.Dispatches))
	}
	if d := arriveAt(t, b, wake, Never); d != nil {
		t.Errorf("%+v: that one is not overdue", d)
	}
}

func TestNothingWithADeadlineIsHeldBack(t *testing.T) {
	b, _, now := apartWorld(t)
	if d := arriveAt(t, b, now, Never); d != nil {
		t.Fatalf("%+v runs beside another batch", d)
	}
	if d := arriveAt(t, b, now, now+Time(time.Second)); d == nil || d.Rows != 2 {
		t.Errorf("%+v goes out, not the one with a deadline and what waited before it", d)
	}
}

// Batches that take far longer are rare, and no replay may have seen one.
func TestABatchThatTakesFarLongerThanOthersIsNotWaitedFor(t *testing.T) {
	b, first, now := apartWorld(t)
	b.BatchDone(first.Worker, first.Batch, now, now)
	slow := Request{ID: 50, Client: 50, Rows: 1, Level: DefaultLevel, Arrived: now, Deadline: Never, Dims: Dims{7}}
	for range 2 * youngPoint { // half a second each, so it is known
		if err := b.Arrive(now, slow); err != nil {
			t.Fatal(err)
		}
		d := b.Decide(now).Dispatches[0]
		now += Time(500 * time.Millisecond)
		b.BatchDone(d.Worker, d.Batch, now-Time(500*time.Millisecond), now)
	}
	b.learner.took = float64(10 * time.Millisecond) // long ago
	if err := b.Arrive(now, slow); err != nil {
		t.Fatal(err)
	}
	if b.Decide(now); arriveAt(t, b, now, Never) != nil {
		t.Fatal("a quick request is not held back at all")
	}
	if wake := b.Decide(now).Wake; wake > now+Time(overdueAfter*10*time.Millisecond) {
		t.Errorf("a quick request is held back for %v", time.Duration(wake-now))
	}
	held := now
	for ; b.Queued() > 0; now += Time(time.Millisecond) { // others come meanwhile, and begin no hold of their own
		b.Decide(now)
		if now > held+Time(time.Second) {
			t.Fatal("it is held back for ever")
		}
	}
}

func TestAPolicyThatIsSetEndsWhatIsHeldBack(t *testing.T) {
	b, _, now := apartWorld(t)
	b.learner.waits.taken = apart
	for _, settings := range []policy.Settings{
		{MaxBatchSize: 4, WaitTime: policy.Auto, Levels: []policy.Level{{DefaultTimeout: 5 * time.Millisecond}}},
		{MaxBatchSize: 4},
		{MaxBatchSize: 4, WaitTime: policy.Auto},
	} {
		if err := b.SetPolicy(settings); err != nil {
			t.Fatal(err)
		}
		if b.heldUntil(now) > now {
			t.Errorf("%+v: held back", settings)
		}
	}
}

// How full batches are, once they take another time, nobody knows yet.
func TestBatchesDoNotGoApartAnyMoreWhenThePaceBecomesAnother(t *testing.T) {
	b, _, now := apartWorld(t)
	l := b.learner
	for range 2 * fewRecords {
		now += Time(time.Millisecond)
		l.arrived(&Request{ID: 70, Client: 70, Rows: 1, Arrived: now, Deadline: Never}, 0)
	}
	for _, moved := range []bool{false, true} {
		if moved {
			l.shapes[0].moves++
			l.shapes[0].leaps++
		}
		l.apart, l.waits.taken = true, apart
		l.begin(now, fewRecords)
		if moved == l.apart || moved == l.waits.mayGoApart {
			t.Errorf("moved %v: apart %v, may be %v", moved, l.apart, l.waits.mayGoApart)
		}
	}
	l.begin(now+leapFor, fewRecords)
	if !l.waits.mayGoApart {
		t.Error("long since: not apart")
	}
}

// A request each millisecond, and one alone takes 10: four together leave a worker no time,
// sixteen would if they took no longer.
func TestOneWorkerHasRoomForWhatItCanDoInCheapBatches(t *testing.T) {
	for most, want := range map[int]bool{4: false, 16: true} {
		b, _, now := apartWorld(t)
		if err := b.SetPolicy(policy.Settings{MaxBatchSize: most, WaitTime: policy.Auto}); err != nil {
			t.Fatal(err)
		}
		l := b.learner
		for range 2 * fewRecords {
			now += Time(time.Millisecond)
			l.arrived(&Request{ID: 70, Client: 70, Rows: 1, Arrived: now, Deadline: Never}, 0)
		}
		l.begin(now, 2*fewRecords)
		for class := range sizeClass(most) + 1 {
			l.replay.costs[0].times[0][class] = Time(10 * time.Millisecond)
		}
		if got := l.replay.leavesRoom(); got != want {
			t.Errorf("batches of up to %d rows: %v", most, got)
		}
	}
}

func TestARequestWithADeadlineIsNotRefusedForWhatIsHeldBack(t *testing.T) {
	b, _, now := apartWorld(t)
	arriveAt(t, b, now, Never)
	err := b.Arrive(now, Request{ID: 60, Client: 60, Rows: 1, Level: DefaultLevel, Arrived: now, Deadline: now + Time(10500*time.Microsecond)})
	if err != nil {
		t.Errorf("10.5 ms for a batch of 10 ms, and a worker is free: %v", err)
	}
}

func TestBatchesGoApartOnlyWhereThatIsKnownToBeRight(t *testing.T) {
	two := []replayWorker{{}, {}}
	for name, c := range map[string]struct {
		workers  []replayWorker
		settings policy.Settings
		want     bool
	}{
		"two workers":         {workers: two, want: true},
		"one":                 {workers: two[:1]},
		"one with lanes":      {workers: []replayWorker{{Worker: Worker{Lanes: 2}}}, want: true},
		"more than are known": {workers: make([]replayWorker, mostApart+1)},
		"a queue timeout":     {workers: two, settings: policy.Settings{Levels: []policy.Level{{}, {DefaultTimeout: time.Second}}}},
	} {
		if got := (&replay{workers: c.workers}).mayGoApart(&c.settings); got != c.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}

// Batches go apart where that is better by some per cent in the mean (a better tail does not
// count, a worse one does), stay so while it is no worse, and end it when they are full (one
// at a time could hardly do all the work) or may not any more.
func TestBatchesGoApartForABetterMeanAndStaySo(t *testing.T) {
	for _, c := range []struct {
		what       string
		mean, tail float64 // as multiples of those of no wait
		filled     float64
		was, may   bool
		want       bool
	}{
		{"twice as quick", 0.5, 1, 0.3, false, true, true},
		{"twice as quick, and may not", 0.5, 1, 0.3, false, false, false},
		{"twice as quick, and may not any more", 0.5, 1, 0.3, true, false, false},
		{"better by one per cent", 0.99, 1, 0.3, false, true, false},
		{"better by one per cent, as it was", 0.99, 1, 0.3, true, true, true},
		{"worse by far, and it was", 1.2, 1, 0.3, true, true, false},
		{"twice as quick, and full", 0.5, 1, 0.7, false, true, false},
		{"twice as quick, and full by now", 0.5, 1, 0.7, true, true, false},
		{"quicker, with a tail that is far worse", 0.9, 1.5, 0.3, false, true, false},
		{"quicker, with a tail that is far worse by now", 0.9, 1.5, 0.3, true, true, false},
		{"a better tail alone", 1, 0.5, 0.3, false, true, false},
	} {
		w := waits{mayGoApart: c.may}
		if c.was {
			w.taken = apart
		}
		w.plan(1, 1, Time(time.Millisecond), 100, Time(time.Second), 1, false)
		for i := w.next(); i >= 0; i = w.next() {
			mean, tail := 1.0, 1.0
			if i == apart {
				mean, tail = c.mean, c.tail
			}
			o := outcome{sum: 100 * mean, filled: c.filled, n: 1}
			o.latencies.note(Time(tail * float64(1<<20)))
			w.tried(&o)
		}
		w.choose()
		if got := w.taken == apart; got != c.want {
			t.Errorf("%s: apart %v", c.what, got)
		}
	}
}
