// SPDX-License-Identifier: Apache-2.0

package auto

import (
	"github.com/ringbatch/ringbatch/broker/batcher"
	"github.com/ringbatch/ringbatch/policy"
)

// Batcher is a batcher with an Advisor of its own.
type Batcher struct {
	*batcher.Batcher
	advisor *Advisor
}

// NewBatcher makes an empty batcher that learns how long to wait. Its errors are those
// of batcher.New.
func NewBatcher(settings policy.Settings) (*Batcher, error) {
	a := &Advisor{shapes: make([]shape, 1)}
	b, err := batcher.NewAdvised(settings, a)
	if err != nil {
		return nil, err
	}
	return &Batcher{b, a}, nil
}

// Learned is a copy of what is known now.
func (b *Batcher) Learned() Learned { return b.advisor.learned() }

// Advisor implements batcher.Advisor. See the package comment.
type Advisor struct {
	settings policy.Settings
	learns   bool // wait_time is auto
	plan     plan // in force
	history  history
	clients  []bool // by ClientID: it has joined
	joined   int    // how many have

	workers  []worker // by WorkerID
	busy     int      // workers that have a batch
	took     float64  // by a batch lately, on average, in nanoseconds
	quickest float64  // by the shortest batches lately
	fullRows float64  // rows of a full batch lately, on average; 0: none was seen
	lastDone Time     // when the last batch ended
	shapes   []shape  // cost tables; [0] is of requests without sizes
	arrivals arrivals

	evaluation evaluation
	replay     *replay
}

var _ batcher.Advisor = (*Advisor)(nil)

// plan is one way to run batches.
type plan struct {
	wait Time
	// oneAtATime holds a batch that is not full while another runs: workers that share
	// a GPU slow each other down.
	oneAtATime bool
}

// shape is what is known of one shape of requests.
type shape struct {
	dims batcher.Dims
	costs
	table  table  // complete, for IsLate
	tabled uint32 // costs.batches when it was made
}

// SetPolicy starts again where the policy changes what is best.
func (a *Advisor) SetPolicy(s *policy.Settings) {
	other := s.MaxBatchSize != a.settings.MaxBatchSize || s.LatencyGoal != a.settings.LatencyGoal || s.WaitTime != a.settings.WaitTime
	a.settings = s.Clone()
	a.replay = nil
	if !other {
		return
	}
	a.fullRows = 0
	a.learns = s.WaitTime == policy.Auto
	a.plan = plan{wait: max(0, Time(s.WaitTime))}
	a.evaluation = newEvaluation(Time(s.LatencyGoal))
	for i := range a.shapes {
		a.shapes[i].table.known = false
	}
}

// ClientJoined counts a client.
func (a *Advisor) ClientJoined(c batcher.ClientID) {
	a.clients = grown(a.clients, int(c))
	if !a.clients[c] {
		a.clients[c] = true
		a.joined++
	}
}

// ClientLeft counts it out.
func (a *Advisor) ClientLeft(c batcher.ClientID) {
	if int(c) < len(a.clients) && a.clients[c] {
		a.clients[c] = false
		a.joined--
	}
}

// RequestQueued remembers a request.
func (a *Advisor) RequestQueued(r batcher.Request) {
	if a.learns {
		a.ClientJoined(r.Client)
		a.history.add(&r, a.shapeOf(&r.Dims))
	}
}

// RequestEnded remembers how long it took.
func (a *Advisor) RequestEnded(id batcher.RequestID, at Time) {
	if a.learns && at != batcher.Never {
		a.history.end(id, at)
	}
}

// WaitFor is the wait in force. A request with a deadline waits less if its batch needs
// the time.
func (a *Advisor) WaitFor(arrived, deadline Time, q batcher.Queue) Time {
	if deadline == batcher.Never || a.plan.wait == 0 {
		return a.plan.wait
	}
	batch := margin * float64(a.expected(&a.shapes[0], q.Rows, a.lanes()-1))
	return max(0, min(a.plan.wait, deadline-arrived-Time(batch)))
}

// shapeOf is the number of a shape; a new one gets a number while there are any.
func (a *Advisor) shapeOf(d *batcher.Dims) int {
	if *d == (batcher.Dims{}) {
		return 0
	}
	for i := 1; i < len(a.shapes); i++ {
		if a.shapes[i].dims == *d {
			return i
		}
	}
	if len(a.shapes) <= maxShapes {
		a.shapes = append(a.shapes, shape{dims: *d})
	}
	return len(a.shapes) - 1
}

// history is the latest requests, in the order in which they were queued.
type history struct {
	ring     []record // maxRequests, once there is one
	count    int      // requests so far
	numberOf []int    // by RequestID: its number, from 0
}

// record is one request as it came.
type record struct {
	arrived Time
	latency Time // 0: unknown
	budget  Time // until its deadline; 0: none
	client  batcher.ClientID
	rows    int32
	level   uint8
	shape   uint8
}

func (h *history) add(r *batcher.Request, shape int) {
	if h.ring == nil {
		h.ring = make([]record, maxRequests)
	}
	x := record{arrived: r.Arrived, client: r.Client, rows: int32(r.Rows), level: uint8(r.Level), shape: uint8(shape)}
	if r.Deadline != batcher.Never {
		x.budget = max(1, r.Deadline-r.Arrived)
	}
	h.ring[h.count%maxRequests] = x
	h.numberOf = grown(h.numberOf, int(r.ID))
	h.numberOf[r.ID] = h.count
	h.count++
}

func (h *history) end(id batcher.RequestID, at Time) {
	if int(id) < len(h.numberOf) && h.count-h.numberOf[id] <= maxRequests && h.count > 0 {
		x := &h.ring[h.numberOf[id]%maxRequests]
		x.latency = max(1, at-x.arrived)
	}
}

// latest is the i-th last record, from 0.
func (h *history) latest(i int) *record { return &h.ring[(h.count-1-i)%maxRequests] }

// window is how many of the latest requests to replay: those of the last second, but
// no more than show what enoughBatches of the given time do, and fewRequests at least.
func (h *history) window(now, quickest Time) (n int) {
	have := min(h.count, maxRequests)
	for n < have && (n < fewRequests || h.latest(n).arrived > now-remembered) {
		n++
		if n >= enoughRequests && n%64 == 0 && now-h.latest(n-1).arrived > enoughBatches*quickest {
			break
		}
	}
	return n
}
