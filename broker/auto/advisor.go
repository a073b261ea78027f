// SPDX-License-Identifier: Apache-2.0

package auto

import (
	"cmp"
	"slices"
	"time"

	"github.com/ringbatch/ringbatch/broker/batcher"
	"github.com/ringbatch/ringbatch/policy"
)

// Batcher is a batcher and its Advisor.
type Batcher struct {
	*batcher.Batcher
	advisor *Advisor
}

// NewBatcher makes an empty batcher that learns how long to wait. Its errors are those of batcher.New.
func NewBatcher(settings policy.Settings) (*Batcher, error) {
	a := &Advisor{shapes: make([]shape, 1), ring: make([]record, maxRequests)}
	b, err := batcher.NewAdvised(settings, a)
	if err != nil {
		return nil, err
	}
	return &Batcher{b, a}, nil
}

// Advisor implements batcher.Advisor. See the package comment.
type Advisor struct {
	settings policy.Settings
	learns   bool     // wait_time is auto
	plan     plan     // in force
	clients  int      // that are attached
	ring     []record // the latest requests, in the order in which they were queued
	count    int      // requests so far
	numberOf []int    // by RequestID: its number, from 0

	workers     []worker  // by WorkerID
	busy        int       // workers that have a batch
	took        float64   // by a batch lately, on average, in nanoseconds
	lastDone    Time      // when the last batch ended
	batches     int       // learned from so far
	shapes      []shape   // [0] is of requests without sizes
	changes     int       // of the costs so far
	free        []Time    // backs freeLanes
	lastArrival Time      // of a request, refused or not
	gap         float64   // nanoseconds between two of them, lately
	margins     []float64 // by level: how many times its expected time a request must have

	evaluation evaluation
	replay     *replay
}

// plan is one way to run batches.
type plan struct {
	wait       Time
	oneAtATime bool // a batch that is not full waits while another runs
}

// shape holds the costs of one shape of requests.
type shape struct {
	dims batcher.Dims
	costs
}

// record is one request as it came.
type record struct {
	arrived   Time
	latency   Time // 0: unknown
	budget    Time // until its deadline; 0: none
	client    batcher.ClientID
	rows      int32
	cost      int32 // of a row
	level     uint8
	shape     uint8
	latestEnd Time // of its batch, for an answer in time; Never: not known
}

// SetPolicy starts again if the new policy may need another plan.
func (a *Advisor) SetPolicy(s *policy.Settings) {
	was := a.settings
	a.settings = s.Clone()
	for len(a.margins) < s.LevelCount() {
		a.margins = append(a.margins, 1+caution)
	}
	a.replay, a.evaluation.queue = newReplay(a.settings), nil
	sameSizes := s.MaxBatchSize == was.MaxBatchSize && s.MaxBatchCost == was.MaxBatchCost
	if !sameSizes && s.MaxBatchCost+was.MaxBatchCost > 0 { // size means something else from now on
		for i := range a.shapes {
			a.shapes[i].costs = costs{}
		}
	}
	if sameSizes && s.LatencyGoal == was.LatencyGoal && s.WaitTime == was.WaitTime {
		return
	}
	a.learns = s.WaitTime == policy.Auto && s.MaxBatchSize > 1 // otherwise every batch is full
	a.plan = plan{wait: max(0, Time(s.WaitTime))}
	a.evaluation = newEvaluation(Time(s.LatencyGoal))
}

// RequestQueued remembers a request.
func (a *Advisor) RequestQueued(now Time, r batcher.Request) {
	x := record{arrived: r.Arrived, client: r.Client, rows: int32(r.Rows), cost: int32(r.Cost), level: uint8(r.Level),
		shape: uint8(a.shapeOf(&r.Dims))}
	if r.Deadline != batcher.Never {
		x.budget = max(1, r.Deadline-r.Arrived)
	}
	size := sizeOfBatch(&a.settings, r.Rows, r.Rows*r.Cost)
	if x.latestEnd, _ = a.latestEnd(now, &r); float64(x.latestEnd-now) < a.shapes[x.shape].expected(size, a.busy) {
		x.latestEnd = batcher.Never // it has no chance, so it says nothing about the margin
	}
	a.ring[a.count%maxRequests] = x
	a.numberOf = grown(a.numberOf, int(r.ID))
	a.numberOf[r.ID] = a.count
	a.count++
}

// RequestEnded remembers how long a request took, and whether it was late.
func (a *Advisor) RequestEnded(id batcher.RequestID, at Time) {
	if at == batcher.Never || int(id) >= len(a.numberOf) || a.count-a.numberOf[id] > maxRequests {
		return
	}
	x := &a.ring[a.numberOf[id]%maxRequests]
	if x.latency = max(1, at-x.arrived); x.latestEnd == batcher.Never {
		return
	}
	// The margin settles where lateShare of the requests are late. A batch of any size counts the same.
	step := caution * min(1, float64(a.lanes())*a.gap/max(1, a.took))
	if at < x.latestEnd {
		step *= -lateShare
	}
	a.margins[x.level] = max(1, min(a.margins[x.level]+step, farOff))
}

// latest is the i-th last request, from 0.
func (a *Advisor) latest(i int) *record { return &a.ring[(a.count-1-i)%maxRequests] }

// replaySize is how many of the latest requests to replay: a second of them, but at least fewRequests.
func (a *Advisor) replaySize(now Time) (n int) {
	have := min(a.count, maxRequests)
	for n < have && (n < fewRequests || a.latest(n).arrived > now-remembered) {
		n++
		if n >= enoughRequests && n%64 == 0 && float64(now-a.latest(n-1).arrived) > enoughBatches*a.took {
			break
		}
	}
	return n
}

// WaitFor is the wait in force. A request with a deadline waits less if its batch needs the time.
func (a *Advisor) WaitFor(arrived, deadline Time, q batcher.Queue) Time {
	if deadline == batcher.Never || a.plan.wait == 0 {
		return a.plan.wait
	}
	batch := a.margins[0] * a.shapes[0].expected(sizeOfBatch(&a.settings, q.Rows, q.Cost), a.lanes()-1)
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

// Learned shows people the state of an advisor.
type Learned struct {
	Wait       time.Duration // in force
	OneAtATime bool          // batches that are not full go one at a time
	Tried      []TriedWait   // with wait_time auto: results of the last replays, by ascending wait
	Costs      []LearnedCost // of the most common shape, by ascending rows
	Slowdown   []float64     // how many times as long a batch takes beside 0, 1, 2 … busy workers
}

// TriedWait is the result of one wait in the last replays.
type TriedWait struct {
	Wait       time.Duration
	OneAtATime bool
	Latency    float64 // as a multiple of the latency without a wait
}

// LearnedCost is the time of a batch while no other worker is busy.
type LearnedCost struct {
	Rows    int
	Time    time.Duration
	Batches int // of this size that were seen
}

// Learned returns the present state.
func (b *Batcher) Learned() (out Learned) {
	a := b.advisor
	out.Wait, out.OneAtATime = time.Duration(a.plan.wait), a.plan.oneAtATime
	for i := range a.evaluation.candidates {
		if c := &a.evaluation.candidates[i]; a.learns && c.without.latency > 0 {
			out.Tried = append(out.Tried, TriedWait{time.Duration(c.wait), c.oneAtATime, c.with.latency / c.without.latency})
		}
	}
	s := slices.MaxFunc(a.shapes, func(x, y shape) int { return cmp.Compare(x.batches, y.batches) })
	lanes := max(1, a.lanes())
	var t table
	if !t.fill(&s.costs, a.settings.MaxBatchSize, lanes-1) {
		return out
	}
	for i := 0; i <= classOf(a.settings.MaxBatchSize); i++ {
		batches := 0
		for j := range s.curves {
			batches += int(s.curves[j].cells[i].count)
		}
		if batches > 0 {
			out.Costs = append(out.Costs, LearnedCost{sizeOf(i), time.Duration(t[0][i]), batches})
		}
	}
	for j := range min(lanes, maxOthers+1) {
		out.Slowdown = append(out.Slowdown, float64(t[j][0])/float64(t[0][0]))
	}
	return out
}
