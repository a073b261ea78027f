// SPDX-License-Identifier: Apache-2.0

package auto

import (
	"cmp"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/broker/batcher"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/policy"
)

const (
	us = Time(time.Microsecond)
	ms = Time(time.Millisecond)
)

// world runs a batcher on a virtual clock: workers take as long as cost says.
type world struct {
	b       *Batcher
	now     Time
	cost    func(rows, others int) Time
	ends    []running // by end
	next    batcher.RequestID
	arrived map[batcher.RequestID]Time
	latency Time // of all answers so far
	answers int
	refused int
	clients int // that send, in turn
}

type running struct {
	end, start Time
	d          batcher.Dispatch
}

func newWorld(t *testing.T, s policy.Settings, workers int, cost func(rows, others int) Time) *world {
	t.Helper()
	b, err := NewBatcher(s)
	must.Do(t, err)
	for i := range workers {
		b.WorkerReady(batcher.Worker{ID: batcher.WorkerID(i)})
	}
	for c := range 64 {
		b.ClientJoined(batcher.ClientID(c))
	}
	return &world{b: b, cost: cost, clients: 64, arrived: map[batcher.RequestID]Time{}}
}

// arrive sends a request of one row.
func (w *world) arrive(budget Time) error {
	w.next = (w.next + 1) % 4096
	r := batcher.Request{ID: w.next, Client: batcher.ClientID(int(w.next) % w.clients), Rows: 1, Arrived: w.now, Deadline: batcher.Never}
	if budget > 0 {
		r.Deadline = w.now + budget
	}
	err := w.b.Arrive(w.now, r)
	if err == nil {
		w.arrived[r.ID] = w.now
	} else {
		w.refused++
	}
	return err
}

// runUntil goes on until a time: batches end, and the batcher decides.
func (w *world) runUntil(until Time) {
	for {
		d := w.b.Decide(w.now)
		for _, x := range d.Dispatches {
			x.Requests = slices.Clone(x.Requests)
			w.ends = append(w.ends, running{w.now + w.cost(x.PadTo, len(w.ends)), w.now, x})
		}
		slices.SortStableFunc(w.ends, func(a, b running) int { return cmp.Compare(a.end, b.end) })
		w.b.Learn(w.now)
		at := d.Wake
		if len(w.ends) > 0 {
			at = min(at, w.ends[0].end)
		}
		if at > until {
			w.now = until
			return
		}
		w.now = max(at, w.now)
		if len(w.ends) > 0 && w.ends[0].end <= w.now {
			x := w.ends[0]
			w.ends = w.ends[1:]
			w.b.BatchDone(x.d.Worker, x.d.Batch, x.start, x.end)
			for _, id := range x.d.Requests {
				w.latency += x.end - w.arrived[id]
				w.answers++
			}
		}
	}
}

// poisson sends requests at a rate per second, for a time.
func (w *world) poisson(rng *rand.Rand, rate float64, for_ Time) {
	for end := w.now + for_; w.now < end; {
		w.runUntil(w.now + Time(rng.ExpFloat64()*1e9/rate))
		w.arrive(0)
	}
}

// plan is the plan in force.
func (w *world) plan() plan { return w.b.advisor.plan }

func autoSettings(max int) policy.Settings {
	return policy.Settings{MaxBatchSize: max, WaitTime: policy.Auto}
}

// linear is a cost of one time for a batch and one for each row.
func linear(fixed, row Time) func(int, int) Time {
	return func(rows, _ int) Time { return fixed + Time(rows)*row }
}

// killWorker kills the worker whose batch would end first. Its requests go back.
func (w *world) killWorker() {
	if len(w.ends) == 0 {
		return
	}
	dead := w.ends[0].d.Worker
	w.b.WorkerGone(dead)
	for _, x := range w.ends {
		for _, id := range x.d.Requests {
			if x.d.Worker == dead {
				w.b.Requeue(w.now, batcher.Request{
					ID: id, Client: batcher.ClientID(int(id) % w.clients), Rows: 1, Arrived: w.arrived[id], Deadline: batcher.Never,
				})
			}
		}
	}
	w.ends = slices.DeleteFunc(w.ends, func(x running) bool { return x.d.Worker == dead })
}
