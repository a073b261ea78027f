// SPDX-License-Identifier: Apache-2.0

package batcher

import (
	"errors"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/policy"
)

// crowd is clients with deadlines before workers, on a clock that goes by small steps.
type crowd struct {
	workers int
	clients []*crowdClient
	takes   func(now Time, shape uint32, rows int) Time
	before  func() // each step
}

// crowdClient sends a request whenever it has none in flight, or as often as it pleases.
type crowdClient struct {
	shape    uint32
	every    Time // on average; 0: after the answer
	retry    Time // after a refusal
	deadline Time
	from     Time

	next    Time
	waits   bool
	inTime  map[Time]int // by second
	refused map[Time]int
}

type crowdRun struct {
	worker     WorkerID
	batch      BatchID
	start, end Time
	requests   []RequestID
}

func (w *crowd) run(t *testing.T, b *Batcher, until Time) {
	t.Helper()
	const step = Time(50 * time.Microsecond)
	rng := rand.New(rand.NewPCG(1, 2))
	for i := range w.workers {
		b.WorkerReady(Worker{ID: WorkerID(i)})
	}
	for i, c := range w.clients {
		b.ClientJoined(ClientID(i))
		c.next = c.from + Time(rng.Int64N(int64(time.Millisecond)))
		c.inTime, c.refused = map[Time]int{}, map[Time]int{}
	}
	var runs []crowdRun
	owner, due := map[RequestID]*crowdClient{}, map[RequestID]Time{}
	ended := func(now Time, id RequestID, answered bool) {
		c := owner[id]
		if answered && now <= due[id] {
			c.inTime[now/Time(time.Second)]++
		}
		if c.every == 0 {
			c.waits, c.next = false, now+1
		}
	}
	id := RequestID(0)
	for now := step; now < until; now += step {
		if w.before != nil {
			w.before()
		}
		for k := 0; k < len(runs); k++ {
			if r := runs[k]; r.end <= now {
				runs = append(runs[:k], runs[k+1:]...)
				k--
				b.BatchDone(r.worker, r.batch, r.start, r.end)
				for _, id := range r.requests {
					ended(now, id, true)
				}
			}
		}
		for i, c := range w.clients {
			for c.next <= now && !c.waits {
				id++
				r := Request{ID: id, Client: ClientID(i), Rows: 1, Arrived: now, Deadline: now + c.deadline}
				r.Dims[0] = c.shape
				err := b.Arrive(now, r)
				if err != nil && !errors.Is(err, ErrLate) {
					t.Fatal(err)
				}
				owner[id], due[id] = c, r.Deadline
				switch {
				case err != nil:
					c.refused[now/Time(time.Second)]++
					c.next = now + max(1, c.retry)
				case c.every == 0:
					c.waits = true
				}
				if c.every > 0 {
					c.next = now + Time(float64(c.every)*rng.ExpFloat64())
				}
			}
		}
		d := b.Decide(now)
		for i := range d.Dispatches {
			x := &d.Dispatches[i]
			runs = append(runs, crowdRun{x.Worker, x.Batch, now, now + w.takes(now, x.Dims[0], x.Rows), append([]RequestID(nil), x.Requests...)})
		}
		for _, e := range d.Ended {
			ended(now, e.ID, false)
		}
		b.Learn(now)
	}
}

// of is how many of the clients with a shape, in a second.
func (w *crowd) of(shape uint32, second Time) (inTime, refused int) {
	for _, c := range w.clients {
		if c.shape == shape {
			inTime += c.inTime[second]
			refused += c.refused[second]
		}
	}
	return inTime, refused
}

func TestAQuickShapeIsNotRefusedForASlowOne(t *testing.T) {
	const ms = Time(time.Millisecond)
	b, err := New(policy.Settings{MaxBatchSize: 32})
	if err != nil {
		t.Fatal(err)
	}
	w := &crowd{workers: 4, takes: func(_ Time, shape uint32, rows int) Time {
		if shape == 1 {
			return 2*ms + Time(rows)*ms/16
		}
		return 40 * ms
	}}
	for range 8 {
		w.clients = append(w.clients, &crowdClient{shape: 1, every: 10 * ms, deadline: 30 * ms, from: Time(time.Second)})
		w.clients = append(w.clients, &crowdClient{shape: 2, every: 40 * ms, deadline: Time(time.Second)})
	}
	w.run(t, b, 3*Time(time.Second))
	if inTime, refused := w.of(1, 2); inTime < 700 || refused > inTime/50 {
		t.Errorf("%d of the quick shape in time in a second, %d refused", inTime, refused)
	}
	if inTime, refused := w.of(2, 2); inTime < 150 || refused > 0 {
		t.Errorf("%d of the slow shape in time in a second, %d refused", inTime, refused)
	}
}

// Clients that try again at once after a refusal look like many more than they are.
func TestRefusalsEndWithWhatMadeThem(t *testing.T) {
	const ms, second = Time(time.Millisecond), Time(time.Second)
	b, err := New(policy.Settings{MaxBatchSize: 32})
	if err != nil {
		t.Fatal(err)
	}
	w := &crowd{workers: 1, takes: func(now Time, _ uint32, rows int) Time {
		takes := 5*ms + Time(rows-1)*35*ms/31
		if now > 3*second && now < 3*second+100*ms {
			takes *= 4
		}
		return takes
	}}
	for range 8 {
		w.clients = append(w.clients, &crowdClient{deadline: 35 * ms, retry: ms / 4})
	}
	w.run(t, b, 8*second)
	if _, refused := w.of(0, 3); refused == 0 {
		t.Error("none were refused while batches were slow: nothing is tested")
	}
	if inTime, refused := w.of(0, 7); inTime < 400 || refused > 0 {
		t.Errorf("%d in time in a second, %d refused, 4 s after batches were slow", inTime, refused)
	}
}

// With batches that differ by chance the pace seems to become another all the time.
func TestAnEvaluationIsFinishedThoughThePaceBecomesAnother(t *testing.T) {
	const ms = Time(time.Millisecond)
	b, err := New(policy.Settings{MaxBatchSize: 32, WaitTime: policy.Auto})
	if err != nil {
		t.Fatal(err)
	}
	w := &crowd{workers: 2, takes: func(Time, uint32, int) Time { return 5 * ms }, before: func() { b.learner.shapes[0].moves++ }}
	for range 8 {
		w.clients = append(w.clients, &crowdClient{every: 4 * ms, deadline: Time(time.Second)})
	}
	w.run(t, b, Time(time.Second))
	if len(b.Learned().Tried) == 0 {
		t.Error("no wait was tried in a second")
	}
}
