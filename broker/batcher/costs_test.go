// SPDX-License-Identifier: Apache-2.0

package batcher

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/policy"
)

// costWorld runs batches one after the other on a machine whose pace changes.
type costWorld struct {
	costs
	now    Time
	pace   float64
	perRow time.Duration
}

func (w *costWorld) takes(rows int) Time {
	return Time(w.pace * float64(5*time.Millisecond+time.Duration(rows)*w.perRow))
}

func (w *costWorld) run(rows int) { w.runBeside(rows, 0) }

func (w *costWorld) runBeside(rows, others int) {
	took := w.takes(rows)
	w.observe(rows, others, w.now, took, false)
	w.now += took
}

// expects is what a size is taken to last, as a multiple of what it would last at the present pace.
func (w *costWorld) expects(rows int) float64 {
	var t costTable
	t.fill(&w.costs, 32, 0)
	return float64(t.of(rows, 0)) / float64(w.takes(rows))
}

// A machine that others use, too, is slow for a while, at once, and recovers little
// by little. Full batches are not seen meanwhile: what they take must be what it was.
// It used to be multiplied each time, to twenty times as much; and when full
// batches came again that turned out wrong, and small ones were taken to last a
// seventh of what they can.
func TestASizeThatIsNotSeenGoesWithTheMachineAndDoesNotRunAway(t *testing.T) {
	w := &costWorld{pace: 1, perRow: 300 * time.Microsecond}
	rng := rand.New(rand.NewPCG(1, 2))
	small := func(n int) {
		for range n {
			w.run(1 + rng.IntN(6))
		}
	}
	for range 200 {
		w.run(32)
	}
	small(500)
	for range 100 {
		w.pace = 2
		small(20)
		for w.pace > 1.01 {
			w.pace = max(1, w.pace*0.98)
			small(3)
		}
		small(100)
	}
	if x := w.expects(32); x < 0.85 || x > 1.2 {
		t.Errorf("after a hundred slow times full batches are taken to last %.2f times as long as they do", x)
	}
	for range 40 {
		w.run(32)
	}
	for rows := 1; rows <= 6; rows++ {
		if x := w.expects(rows); x < 0.85 || x > 1.2 {
			t.Errorf("then %d rows are taken to last %.2f times as long as they do", rows, x)
		}
	}
}

// News about the machine is news about the sizes that are not seen, and stays so
// when it has become the usual.
func TestAMachineThatBecomesSlowerForGoodIsSlowerForAllSizes(t *testing.T) {
	w := &costWorld{pace: 1, perRow: 300 * time.Microsecond}
	for i := range 400 {
		w.run(1 + i%8)
		w.run(32)
	}
	for i := range 500 {
		w.run(1 + i%8)
	}
	w.pace = 3
	for _, batches := range []int{8, 100, 1000, 10_000} {
		for i := range batches {
			w.run(1 + i%8)
		}
		if x := w.expects(32); math.Abs(math.Log(x)) > 0.25 {
			t.Errorf("%d batches after it became three times as slow, full batches are taken to last %.2f times as long as they do", batches, x)
		}
	}
}

func withOneWorker(t *testing.T) *Batcher {
	t.Helper()
	b, err := New(policy.Settings{MaxBatchSize: 32})
	if err != nil {
		t.Fatal(err)
	}
	b.ClientJoined(0)
	b.WorkerReady(Worker{ID: 0})
	return b
}

// runOne sends a request of so many rows through a batcher with one worker, and ends
// its batch after a time. It returns when that was.
func runOne(b *Batcher, now Time, id RequestID, rows int, took Time, unanswered bool) Time {
	if err := b.Arrive(now, Request{ID: id, Rows: rows, Arrived: now, Deadline: Never}); err != nil {
		panic(err)
	}
	for _, d := range b.Decide(now).Dispatches {
		if unanswered {
			b.Unanswered(d.Worker, d.Batch)
		}
		b.BatchDone(d.Worker, d.Batch, now, now+took)
	}
	return now + took
}

// A batch that failed at once, or whose requests had all been canceled, was not
// computed: it does not teach what its size takes. But what takes long and answers
// nobody in time does: those that come next cannot make it either.
func TestABatchThatAnsweredNobodyDoesNotTeachThatItsSizeIsQuick(t *testing.T) {
	const usual = Time(6 * time.Millisecond)
	for _, c := range []struct {
		name       string
		took, want Time
	}{{"given up", usual / 8, usual}, {"slow", 3 * usual, 3 * usual}} {
		b := withOneWorker(t)
		now := Time(1)
		for range 50 {
			now = runOne(b, now, 0, 31, usual, false)
		}
		for range 50 {
			now = runOne(b, now, 0, 31, c.took, true)
		}
		costs := b.Learned().Costs
		if len(costs) != 1 || math.Abs(math.Log(float64(costs[0].Time)/float64(c.want))) > 0.1 {
			t.Errorf("%s: %v", c.name, costs)
		}
	}
}

// Batches never take quite the same. Those that answered nobody must not count only
// when they were slow: what is learned would go up with each of them.
func TestBatchesThatAnswerNobodyTeachWhatOthersDo(t *testing.T) {
	learned := func(unansweredShare float64) float64 {
		b := withOneWorker(t)
		rng := rand.New(rand.NewPCG(1, 2))
		now := Time(1)
		for i := range 5000 {
			took := Time(float64(6*time.Millisecond) * math.Exp(0.2*rng.NormFloat64()))
			unanswered := rng.Float64() < unansweredShare
			now = runOne(b, now, 0, 31, took, unanswered && i >= 50)
		}
		return float64(b.Learned().Costs[0].Time)
	}
	all := learned(0)
	for _, share := range []float64{0.5, 0.9, 1} {
		if x := learned(share) / all; math.Abs(math.Log(x)) > 0.05 {
			t.Errorf("with %.0f %% unanswered a batch is taken to last %.2f times as long as if all were answered", 100*share, x)
		}
	}
}

// What a batch takes at least is what requests are refused by: one that failed
// half-way through was not as quick as that.
func TestABatchThatFailedHalfWayDoesNotTeachWhatOthersTakeAtLeast(t *testing.T) {
	const usual = Time(6 * time.Millisecond)
	b := withOneWorker(t)
	now := Time(1)
	for range 50 {
		now = runOne(b, now, 0, 31, usual, false)
	}
	now = runOne(b, now, 0, 31, usual*55/100, true)
	for range 20 {
		now = runOne(b, now, 0, 31, usual, false)
	}
	if err := b.Arrive(now, Request{ID: 1, Rows: 31, Arrived: now, Deadline: now + usual*2/3}); err == nil {
		t.Error("a request that cannot make its deadline was taken")
	}
}

// Where full batches run side by side since batches became slower, none runs alone, and
// nothing is seen of what that takes now.
func TestWhatBatchesTakeAloneCatchesUpWithWhatTheyTakeSideBySide(t *testing.T) {
	const ms = Time(time.Millisecond)
	var c costs
	at := Time(0)
	see := func(rows, others int, took Time) {
		c.observe(rows, others, at, took, false)
		at += took
	}
	for range 100 {
		see(1, 0, 2*ms)
		see(8, 0, 4*ms)
	}
	var table costTable
	table.fill(&c, 32, 1)
	before := table.of(8, 0)
	for range 2 * youngPoint {
		see(32, 1, 120*ms)
	}
	table.fill(&c, 32, 1)
	// 120 ms for two that took turns are 60 ms alone, and a third less at best.
	if got := table.of(32, 0); got < 39*ms || got > 121*ms {
		t.Errorf("32 rows alone are taken to last %v, 120 ms side by side", time.Duration(got))
	}
	if got := table.of(8, 0); got < 2*before {
		t.Errorf("8 rows alone are taken to last %v, as before (%v)", time.Duration(got), time.Duration(before))
	}
	for range 20 {
		see(8, 0, 4*ms)
	}
	table.fill(&c, 32, 1)
	if got := table.of(8, 0); got > 5*ms {
		t.Errorf("8 rows alone take 4 ms, and are taken to last %v", time.Duration(got))
	}
	// One size that is slow beside others does not make all slow alone.
	for range 30 {
		see(1, 1, 3*ms)
		see(2, 1, 3*ms)
	}
	see(16, 1, 100*ms)
	table.fill(&c, 32, 1)
	if got := table.of(1, 0); got > 3*ms {
		t.Errorf("1 row alone is taken to last %v", time.Duration(got))
	}
}
