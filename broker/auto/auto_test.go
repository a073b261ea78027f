// SPDX-License-Identifier: Apache-2.0

package auto

import (
	"math/rand/v2"
	"testing"

	"github.com/ringbatch/ringbatch/broker/batcher"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/policy"
)

func newRand() *rand.Rand { return rand.New(rand.NewPCG(1, 2)) }

// Two batches side by side take as long as one after the other: then the first is done
// sooner alone.
func TestBatchesGoOneAtATimeWhereWorkersShareTheirDevice(t *testing.T) {
	w := newWorld(t, autoSettings(64), 4, func(rows, others int) Time { return 3300 * us * Time(1+others) })
	w.poisson(newRand(), 3000, 3000*ms)
	if p := w.plan(); !p.oneAtATime {
		t.Errorf("plan %+v, tried %+v", p, w.b.Learned().Tried)
	}
	for w.b.advisor.busy == 0 {
		w.poisson(newRand(), 3000, ms)
	}
	if until := w.b.advisor.HoldUntil(w.now); until <= w.now || until > w.now+10*ms {
		t.Errorf("batches are held until %v at %v", until, w.now)
	}
}

// The first batch of each size takes 300 ms, as on a GPU that loads its kernels.
func TestColdBatchesAreNotBelieved(t *testing.T) {
	warm := map[int]bool{}
	w := newWorld(t, autoSettings(32), 1, func(rows, _ int) Time {
		if !warm[rows] {
			warm[rows] = true
			return 300 * ms
		}
		return ms + Time(rows)*200*us
	})
	w.poisson(newRand(), 100, 20_000*ms)
	latency, answers := w.latency, w.answers
	w.poisson(newRand(), 100, 5000*ms)
	if mean := (w.latency - latency) / Time(w.answers-answers); mean > 2*ms {
		t.Errorf("a request takes %v ns, tried %+v", mean, w.b.Learned().Tried)
	}
}

// At twice the capacity the broker refuses half of the requests, and answers the others in time.
func TestUnderOverloadLateRequestsAreRefused(t *testing.T) {
	s := autoSettings(8)
	w := newWorld(t, s, 2, linear(4*ms, 500*us))
	rng := newRand()
	for w.now < 2000*ms {
		w.runUntil(w.now + Time(rng.ExpFloat64()*1e9/4000))
		w.arrive(20 * ms)
	}
	if done := float64(w.answers) / (float64(w.now) / 1e9); done < 0.9*2000 {
		t.Errorf("%.0f answers per second of 2000, %d refused", done, w.refused)
	}
	if mean := w.latency / Time(w.answers); mean > 20*ms {
		t.Errorf("a request takes %v ns of 20 ms", mean)
	}
}

func TestClientsThatSendWhenAnsweredAreSeen(t *testing.T) {
	for name, closed := range map[string]bool{"closed": true, "open": false} {
		w := newWorld(t, autoSettings(8), 1, linear(4*ms, 0))
		w.clients = 8
		rng := newRand()
		for range 400 {
			if closed {
				for len(w.ends) > 0 {
					w.runUntil(w.ends[0].end)
				}
				for range 8 {
					w.arrive(0)
				}
				w.runUntil(w.now + 1)
			} else {
				w.runUntil(w.now + Time(rng.ExpFloat64()*float64(5*ms)))
				w.arrive(0)
			}
		}
		a := w.b.advisor
		p := newReplay(a.settings)
		p.load(a, min(a.count, 200))
		if p.closed != closed {
			t.Errorf("%s: %v", name, p.closed)
		}
	}
}

// One very costly request runs, larger than all before. What it takes is not known, so nobody is
// refused for it.
func TestASizeNeverSeenRefusesNobody(t *testing.T) {
	s := autoSettings(64)
	s.MaxBatchCost = 8192
	w := newWorld(t, s, 1, linear(2*ms, 0))
	send := func(cost int, budget Time) error {
		w.next++
		return w.b.Arrive(w.now, batcher.Request{
			ID: w.next, Client: batcher.ClientID(w.next % 64), Rows: 1, Cost: cost, Arrived: w.now, Deadline: w.now + budget,
		})
	}
	for i := range 40 { // larger ones are a little slower
		w.cost = linear(2*ms+Time(i%4)*100*us, 0)
		must.Do(t, send(100+300*(i%4), 20_000*ms))
		w.runUntil(w.now + 10*ms)
	}
	must.Do(t, send(policy.MaxCost, 20_000*ms))
	w.runUntil(w.now + ms)
	for i := range 20 {
		if err := send(100, 20_000*ms); err != nil {
			t.Errorf("request %d: %v", i, err)
		}
	}
}

// A random life: whatever happens, nothing panics, and everything that was taken ends.
func TestNothingIsLostWhateverHappens(t *testing.T) {
	for seed := range uint64(100) {
		rng := rand.New(rand.NewPCG(seed, 7))
		randomSettings := func() policy.Settings {
			s := autoSettings(8 + rng.IntN(8))
			switch rng.IntN(4) {
			case 0:
				s.LatencyGoal = 20e6
			case 1:
				s.WaitTime = 1e6
			case 2:
				s.Levels = make([]policy.Level, 2)
			case 3:
				s.MaxBatchCost = 1 + rng.IntN(40)
			}
			return s
		}
		w := newWorld(t, randomSettings(), 1+rng.IntN(4), func(rows, others int) Time {
			return Time(1+rng.IntN(3))*ms + Time(rows*(1+others))*100*us
		})
		for range 200 {
			w.runUntil(w.now + Time(rng.IntN(int(3*ms))))
			switch k := rng.IntN(40); {
			case k == 0:
				if err := w.b.SetPolicy(randomSettings()); err != nil {
					continue // requests in flight conflict with it
				}
			case k == 1 && len(w.ends) > 0:
				w.b.Unanswered(w.ends[0].d.Worker, w.ends[0].d.Batch)
			case k == 2:
				id := batcher.WorkerID(rng.IntN(6))
				w.b.WorkerReady(batcher.Worker{ID: id, Lanes: rng.IntN(3), Depth: rng.IntN(4), PadTo: rng.IntN(40)})
			case k == 3:
				w.killWorker()
			case k < 30:
				w.arrive(Time(rng.IntN(3)) * 15 * ms)
			}
		}
		w.b.WorkerReady(batcher.Worker{ID: 0})
		w.runUntil(w.now + 10_000*ms)
		if w.b.Queued() > 0 || len(w.ends) > 0 {
			t.Fatalf("seed %d: %d wait, %d batches run", seed, w.b.Queued(), len(w.ends))
		}
	}
}
