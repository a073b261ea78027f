// SPDX-License-Identifier: Apache-2.0

package batcher

import (
	"fmt"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/policy"
)

// load keeps a fixed number of requests queued: each step finishes the oldest batch, lets Decide send the
// next one, and refills the queue. The cost is of one Arrive, its Decide, and its share of BatchDone.
type load struct {
	b      *Batcher
	now    Time
	refill func(id RequestID) Request
	queue  []Dispatch
	sent   [][]RequestID
	spare  [][]RequestID
}

func newLoad(tb testing.TB, settings policy.Settings, workers, queued int, refill func(RequestID) Request) *load {
	b, err := New(settings)
	if err != nil {
		tb.Fatal(err)
	}
	l := &load{b: b, refill: refill}
	for id := range queued {
		l.arrive(tb, RequestID(id))
	}
	for w := range workers {
		b.WorkerReady(Worker{ID: WorkerID(w), Depth: 2})
	}
	l.decide()
	for range 4 * queued { // until every array has its final size
		l.step(tb)
	}
	return l
}

func (l *load) arrive(tb testing.TB, id RequestID) {
	l.now += 100
	r := l.refill(id)
	r.ID = id
	r.Arrived = l.now
	if r.Deadline == 0 {
		r.Deadline = Never
	} else {
		r.Deadline += l.now
	}
	if err := l.b.Arrive(l.now, r); err != nil {
		tb.Fatal(err)
	}
}

func (l *load) decide() {
	for _, d := range l.b.Decide(l.now).Dispatches {
		var ids []RequestID
		if n := len(l.spare); n > 0 {
			ids = l.spare[n-1][:0]
			l.spare = l.spare[:n-1]
		}
		l.sent = append(l.sent, append(ids, d.Requests...))
		l.queue = append(l.queue, d)
	}
}

// step runs one batch through and returns its number of requests.
func (l *load) step(tb testing.TB) int {
	done, ids := l.queue[0], l.sent[0]
	copy(l.queue, l.queue[1:])
	copy(l.sent, l.sent[1:])
	l.queue, l.sent = l.queue[:len(l.queue)-1], l.sent[:len(l.sent)-1]
	l.b.BatchDone(done.Worker, done.Batch, 0, 0)
	l.decide()
	for _, id := range ids {
		l.arrive(tb, id)
		l.decide()
	}
	l.spare = append(l.spare, ids)
	return len(ids)
}

// loads are the situations in which a request must cost less than 1 µs and
// allocate nothing.
var loads = []struct {
	name     string
	settings policy.Settings
	refill   func(id RequestID) Request
}{
	{"simple", policy.Settings{MaxBatchSize: 32, WaitTime: time.Millisecond},
		func(id RequestID) Request { return Request{Client: ClientID(id % 64), Rows: 1} }},
	{"1000 clients", policy.Settings{MaxBatchSize: 32, WaitTime: time.Millisecond},
		func(id RequestID) Request { return Request{Client: ClientID(id % 1000), Rows: 1} }},
	{"10000 shapes", policy.Settings{MaxBatchSize: 32, WaitTime: time.Millisecond},
		func(id RequestID) Request {
			return Request{Client: ClientID(id % 64), Rows: 1, Dims: Dims{uint32(id) + 1, 7}}
		}},
	{"shapes come and go", policy.Settings{MaxBatchSize: 32, WaitTime: time.Millisecond}, newShapes()},
	{"deadlines", policy.Settings{MaxBatchSize: 32, WaitTime: time.Millisecond},
		func(id RequestID) Request {
			return Request{Client: ClientID(id % 64), Rows: 1, Deadline: Time(time.Second) + Time(id*7919%1000)*Time(time.Millisecond)}
		}},
	{"short deadlines", policy.Settings{MaxBatchSize: 32, WaitTime: 20 * time.Millisecond},
		func(id RequestID) Request {
			deadline := 4*time.Millisecond + time.Duration(id*7919%1000)*10*time.Microsecond
			return Request{Client: ClientID(id % 64), Rows: 1, Deadline: Time(deadline)}
		}},
	{"levels and ageing", policy.Settings{MaxBatchSize: 32, WaitTime: time.Millisecond, Ageing: 300 * time.Microsecond,
		Levels: make([]policy.Level, 8)},
		func(id RequestID) Request { return Request{Client: ClientID(id % 64), Rows: 1, Level: int(id % 8)} }},
	{"timeouts that delay", policy.Settings{MaxBatchSize: 32, WaitTime: time.Millisecond,
		Levels: []policy.Level{{DefaultTimeout: 500 * time.Microsecond, OnTimeout: policy.Delay}, {}}},
		func(id RequestID) Request { return Request{Client: ClientID(id % 64), Rows: 1, Level: int(id % 2)} }},
	{"rows and preferred sizes", policy.Settings{MaxBatchSize: 32, WaitTime: time.Millisecond, PreferredBatchSizes: []int{8, 16}},
		func(id RequestID) Request { return Request{Client: ClientID(id % 64), Rows: int(1 + id%3)} }},
	{"preserve order", policy.Settings{MaxBatchSize: 32, WaitTime: time.Millisecond, PreserveOrder: true},
		func(id RequestID) Request { return Request{Client: ClientID(id % 1000), Rows: 1} }},
	{"everything", policy.Settings{MaxBatchSize: 32, WaitTime: time.Millisecond, Ageing: 300 * time.Microsecond,
		Levels: make([]policy.Level, 4), PreferredBatchSizes: []int{8, 16}, Buckets: [][]uint32{{64, 128, 256, 512, 1024}}},
		func(id RequestID) Request {
			return Request{Client: ClientID(id % 1000), Rows: int(1 + id%3), Level: int(id % 4),
				Deadline: Time(time.Second) + Time(id*7919%1000)*Time(time.Millisecond), Dims: Dims{uint32(1 + id%1000)}}
		}},
}

// newShapes gives every request a new shape.
func newShapes() func(RequestID) Request {
	next := uint32(0)
	return func(id RequestID) Request {
		next++
		return Request{Client: ClientID(id % 64), Rows: 1, Dims: Dims{next}}
	}
}

func BenchmarkRequest(b *testing.B) {
	for _, x := range loads {
		for _, queued := range []int{100, 10_000} {
			b.Run(fmt.Sprintf("%s/queued=%d", x.name, queued), func(b *testing.B) {
				l := newLoad(b, x.settings, 2, queued, x.refill)
				b.ReportAllocs()
				b.ResetTimer()
				for n := 0; n < b.N; {
					n += l.step(b)
				}
			})
		}
	}
}

func TestNothingIsAllocatedPerRequestInSteadyState(t *testing.T) {
	for _, x := range loads {
		t.Run(x.name, func(t *testing.T) {
			l := newLoad(t, x.settings, 2, 1000, x.refill)
			if allocs := testing.AllocsPerRun(2000, func() { l.step(t) }); allocs != 0 {
				t.Errorf("%v allocations per batch", allocs)
			}
		})
	}
}
