// SPDX-License-Identifier: Apache-2.0

package batcher

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/policy"
)

// deadlineWorld is one worker whose batches take what each test says.
type deadlineWorld struct {
	t   *testing.T
	b   *Batcher
	now Time
	id  RequestID
}

func newDeadlineWorld(t *testing.T) *deadlineWorld {
	b, err := New(policy.Settings{MaxBatchSize: 4})
	if err != nil {
		t.Fatal(err)
	}
	b.WorkerReady(Worker{ID: 0})
	return &deadlineWorld{t: t, b: b}
}

func (w *deadlineWorld) arrive(budget time.Duration) error {
	w.id++
	return w.b.Arrive(w.now, Request{ID: w.id, Rows: 1, Level: DefaultLevel, Arrived: w.now, Deadline: w.now + Time(budget)})
}

// batch runs one request, without a deadline to speak of.
func (w *deadlineWorld) batch(takes time.Duration) {
	w.t.Helper()
	if err := w.arrive(time.Hour); err != nil {
		w.t.Fatal(err)
	}
	w.finish(takes)
}

// busy runs enough batches to tell what they take, and begins one more.
func (w *deadlineWorld) busy(takes time.Duration) {
	w.t.Helper()
	for range youngPoint {
		w.batch(takes)
	}
	if err := w.arrive(time.Hour); err != nil {
		w.t.Fatal(err)
	}
	w.b.Decide(w.now)
}

// finish runs what is queued as one batch.
func (w *deadlineWorld) finish(takes time.Duration) {
	w.t.Helper()
	d := w.b.Decide(w.now)
	if len(d.Dispatches) != 1 {
		w.t.Fatalf("%d batches", len(d.Dispatches))
	}
	batch, started := d.Dispatches[0].Batch, w.now
	w.now += Time(takes)
	w.b.BatchDone(0, batch, started, w.now)
	w.b.Decide(w.now)
}

func TestARequestThatCannotMakeItsDeadlineIsRefusedWhenItArrives(t *testing.T) {
	const ms = time.Millisecond
	w := newDeadlineWorld(t)
	refused := func(budget time.Duration, want bool, when string) {
		t.Helper()
		err := w.arrive(budget)
		if (err != nil) != want || err != nil && !errors.Is(err, ErrLate) {
			t.Errorf("%s, with %v to go: %v", when, budget, err)
		}
	}
	for range floorBatches - 1 {
		w.batch(10 * ms)
	}
	refused(time.Nanosecond, false, "before enough is known")
	w.now++
	w.b.Decide(w.now)
	w.batch(10 * ms)
	refused(9*ms, true, "while the worker is free")
	refused(10*ms, false, "while the worker is free")
	w.b.Decide(w.now) // it runs for 10 ms from here
	w.now += Time(4 * ms)
	refused(16*ms, true, "behind a batch with 6 ms to go")
	refused(17*ms, false, "behind a batch with 6 ms to go")
	w = newDeadlineWorld(t)
	for range floorBatches {
		w.batch(10 * ms)
	}
	w.batch(2 * ms)
	refused(3*ms, false, "after one quick batch")
	w = newDeadlineWorld(t)
	for range floorBatches {
		w.batch(10 * ms)
	}
	w.now += 2 * floorPeriod
	refused(ms, false, "after a silence")
}

// A few batches tell enough of what has to wait: all that is taken before more is known is late.
func TestAfterAFewBatchesWhatHasToWaitForTooLongIsRefused(t *testing.T) {
	const ms = time.Millisecond
	w := newDeadlineWorld(t)
	w.busy(10 * ms)
	if err := w.arrive(15 * ms); !errors.Is(err, ErrLate) {
		t.Errorf("with 15 ms for two batches of 10: %v", err)
	}
	if err := w.arrive(25 * ms); err != nil {
		t.Errorf("with 25 ms for two batches of 10: %v", err)
	}
}

// A request that waits for others leaves time for its batch, which is longer than half of
// the time that it has.
func TestARequestDoesNotWaitForOthersUntilItsBatchIsLate(t *testing.T) {
	const ms = time.Millisecond
	b, err := New(policy.Settings{MaxBatchSize: 4, WaitTime: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	b.ClientJoined(1) // could join
	b.WorkerReady(Worker{ID: 0})
	w := &deadlineWorld{t: t, b: b}
	for range youngPoint {
		if err := w.arrive(10 * ms); err != nil {
			t.Fatal(err)
		}
		w.now += Time(5 * ms) // half of its time
		w.finish(10 * ms)
	}
	if err := w.arrive(15 * ms); err != nil {
		t.Fatal(err)
	}
	if wait := b.Decide(w.now).Wake - w.now; wait <= Time(4*ms) || wait >= Time(5*ms) {
		t.Errorf("with 15 ms and a batch of 10 it waits for %v", time.Duration(wait))
	}
	w.now += Time(5 * ms)
	w.finish(10 * ms)
	if err := w.arrive(100 * ms); err != nil {
		t.Fatal(err)
	}
	if wait := b.Decide(w.now).Wake - w.now; wait != Time(50*ms) {
		t.Errorf("with 100 ms and a batch of 10 it waits for %v", time.Duration(wait))
	}
}

// What was taken and expired in the queue was taken in vain: batches are taken to last longer.
func TestWhatIsTakenAtTheLimitAndExpiresCountsAsLate(t *testing.T) {
	const ms = time.Millisecond
	w := newDeadlineWorld(t)
	w.busy(10 * ms)
	before := w.b.learner.safety
	for range 2 {
		if err := w.arrive(21 * ms); err != nil {
			t.Fatal(err)
		}
	}
	if !w.b.Cancel(w.id) { // which tells nothing
		t.Fatal("it does not wait")
	}
	w.now += Time(21 * ms)
	if d := w.b.Decide(w.now); len(d.Ended) != 1 {
		t.Fatalf("%+v", d)
	}
	if got := w.b.learner.safety; got != before+safetyGain {
		t.Errorf("the safety is %v, was %v", got, before)
	}
}

// What many requests with deadlines far away cost is one comparison.
func TestWhatHasTimeEnoughIsNotLookedAtCloser(t *testing.T) {
	w := newDeadlineWorld(t)
	for range floorBatches {
		w.batch(10 * time.Millisecond)
	}
	r := Request{Rows: 1, Deadline: w.now + Time(time.Second)}
	if n := testing.AllocsPerRun(100, func() {
		if w.b.learner.late(w.now, &r, 3, 0, 0) {
			t.Error("a second is enough")
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// BenchmarkLate is a request near its deadline, while every worker has two batches.
func BenchmarkLate(b *testing.B) {
	for _, workers := range []int{1, 16, 64} {
		b.Run(fmt.Sprintf("workers=%d", workers), func(b *testing.B) {
			l := newLearner(&policy.Settings{MaxBatchSize: 32})
			for i := range workers {
				l.workerReady(Worker{ID: WorkerID(i)})
				l.workers[i].batches = make([]pacedBatch, 2)
				for k := range l.workers[i].batches {
					l.workers[i].batches[k].rows = 1 + (i+k)%32
				}
			}
			for rows := 1; rows <= 32; rows++ {
				l.shapes[0].observe(rows, 0, 0, Time(rows)*Time(time.Millisecond), false)
			}
			r := &Request{Rows: 1, Deadline: Time(10 * time.Millisecond)}
			for b.Loop() {
				l.late(1, r, 16, 0, 0)
			}
		})
	}
}
