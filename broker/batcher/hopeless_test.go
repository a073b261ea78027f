// SPDX-License-Identifier: Apache-2.0

package batcher

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/policy"
)

// hopelessWorld is one worker whose batches take what each test says.
type hopelessWorld struct {
	t   *testing.T
	b   *Batcher
	now Time
	id  RequestID
}

func newHopelessWorld(t *testing.T) *hopelessWorld {
	b, err := New(policy.Settings{MaxBatchSize: 4})
	if err != nil {
		t.Fatal(err)
	}
	b.WorkerReady(Worker{ID: 0})
	return &hopelessWorld{t: t, b: b}
}

func (w *hopelessWorld) arrive(budget time.Duration) error {
	w.id++
	return w.b.Arrive(w.now, Request{ID: w.id, Rows: 1, Level: DefaultLevel, Arrived: w.now, Deadline: w.now + Time(budget)})
}

// batch runs one request, without a deadline to speak of.
func (w *hopelessWorld) batch(takes time.Duration) {
	w.t.Helper()
	if err := w.arrive(time.Hour); err != nil {
		w.t.Fatal(err)
	}
	w.finish(takes)
}

// finish runs what is queued as one batch.
func (w *hopelessWorld) finish(takes time.Duration) {
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
	w := newHopelessWorld(t)
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
	w = newHopelessWorld(t)
	for range floorBatches {
		w.batch(10 * ms)
	}
	w.batch(2 * ms)
	refused(3*ms, false, "after one quick batch")
	w = newHopelessWorld(t)
	for range floorBatches {
		w.batch(10 * ms)
	}
	w.now += 2 * floorPeriod
	refused(ms, false, "after a silence")
}

// What many requests with deadlines far away cost is one comparison.
func TestWhatHasTimeEnoughIsNotLookedAtCloser(t *testing.T) {
	w := newHopelessWorld(t)
	for range floorBatches {
		w.batch(10 * time.Millisecond)
	}
	r := Request{Rows: 1, Deadline: w.now + Time(time.Second)}
	if n := testing.AllocsPerRun(100, func() {
		if w.b.learner.hopeless(w.now, &r, 3, 0) {
			t.Error("a second is enough")
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func TestOneSlowBatchOfARareSizeRefusesNobody(t *testing.T) {
	const ms = Time(time.Millisecond)
	var f floor
	for range floorBatches {
		f.observe(16, 36*ms, ms)
	}
	f.observe(12, 400*ms, ms)
	f.observe(4, 24*ms, ms)
	for rows, want := range map[int]Time{1: 0, 4: 24 * ms, 11: 24 * ms, 12: 24 * ms, 16: 36 * ms, 32: 36 * ms} {
		if got := f.of(rows); got != want {
			t.Errorf("a batch of %d rows takes %d ns at least, want %d", rows, got, want)
		}
	}

	// The first of the largest size is the one that allocates. If it is not the last, the others tell so.
	f.observe(32, 400*ms, ms)
	if got := f.of(32); got != 36*ms {
		t.Errorf("a rare batch of 32 rows takes %d ns at least, want as long as one of 16", got)
	}
	for range rareSize {
		f.observe(32, 400*ms, ms)
	}
	if got := f.of(32); got != 400*ms {
		t.Errorf("batches of 32 rows that are always slow take %d ns at least", got)
	}
}

// BenchmarkHopeless is a request near its deadline, while every worker has two batches.
func BenchmarkHopeless(b *testing.B) {
	for _, workers := range []int{1, 16, 64} {
		b.Run(fmt.Sprintf("workers=%d", workers), func(b *testing.B) {
			l := &learner{settings: policy.Settings{MaxBatchSize: 32}}
			for i := range workers {
				w := workerPace{here: true}
				w.batches = make([]pacedBatch, 2)
				for k := range w.batches {
					w.batches[k].rows = 1 + (i+k)%32
				}
				l.workers = append(l.workers, w)
			}
			for rows := 1; rows <= 32; rows++ {
				l.floor.observe(rows, Time(rows)*Time(time.Millisecond), 1)
			}
			r := &Request{Rows: 1, Deadline: Time(10 * time.Millisecond)}
			for b.Loop() {
				l.hopeless(1, r, 16, 0)
			}
		})
	}
}
