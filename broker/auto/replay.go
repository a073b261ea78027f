// SPDX-License-Identifier: Apache-2.0

package auto

import (
	"math"
	"slices"

	"github.com/ringbatch/ringbatch/broker/batcher"
	"github.com/ringbatch/ringbatch/policy"
)

// replay plays remembered requests through a batcher of its own, with one plan at a
// time and the costs that are known.
type replay struct {
	batcher *batcher.Batcher
	advice  replayAdvice

	// The window, loaded once for all plans.
	window  []record // by arrival; client is a number in the window
	chain   []int32  // by record: the next of the same client; -1: none
	after   []int32  // by record: comes after that answer to its client, from 1; 0: at its own time
	pause   []Time   // by record: from that answer to the request
	clients []replayClient
	closed  bool // clients send when they are answered
	idle    bool // a client is there that has not sent lately
	costs   []table
	most    int // max_batch_size

	// One play.
	start, now Time // the clock goes on from play to play
	wake       Time
	arrivals   arrivalHeap
	workers    []replayWorker
	sentAt     []Time // by record
	result     outcome
}

// replayClient is a client of the window.
type replayClient struct {
	number  batcher.ClientID // its real one
	first   int32            // record
	last    int32
	next    int32 // record; -1: none
	answers []Time
	waits   bool // next comes after an answer that is not there yet
}

type replayWorker struct {
	batcher.Worker
	freeAt  Time
	batches []replayBatch // by end
}

type replayBatch struct {
	id         batcher.BatchID
	start, end Time
	requests   []batcher.RequestID
}

// outcome is what became of the requests that count: those in the middle of the window.
type outcome struct {
	counted, late  int
	sum, squares   float64
	busy           Time // of the workers
	goal           Time
	batches, rows  int
	fill           float64
	countFrom, end int
}

func (o *outcome) score() float64 {
	n := float64(max(1, o.counted))
	return (1-tailWeight)*o.sum + tailWeight*math.Sqrt(o.squares/n)*n
}

func (o *outcome) lateShare() float64 { return float64(o.late) / float64(max(1, o.counted)) }

// replayAdvice is the advisor of the replay's batcher.
type replayAdvice struct {
	batcher.FixedWait
	plan plan
	busy int // batches that run
}

func (x *replayAdvice) WaitFor(Time, Time, batcher.Queue) Time { return x.plan.wait }

func (x *replayAdvice) HoldUntil(Time) Time {
	if x.plan.oneAtATime && x.busy > 0 {
		return batcher.Never
	}
	return -batcher.Never
}

func newReplay(a *Advisor) *replay {
	s := a.settings.Clone()
	s.Buckets, s.WaitTime, s.LatencyGoal = nil, 0, 0
	for i := range s.Levels {
		s.Levels[i] = policy.Level{}
	}
	p := &replay{most: s.MaxBatchSize}
	var err error
	if p.batcher, err = batcher.NewAdvised(s, &p.advice); err != nil {
		panic(err) // the settings are those of a batcher that runs
	}
	return p
}

// load takes the latest n requests, the workers and the costs.
func (p *replay) load(a *Advisor, n int) {
	p.window = p.window[:0]
	for i := n - 1; i >= 0; i-- {
		p.window = append(p.window, *a.history.latest(i))
	}
	slices.SortStableFunc(p.window, func(x, y record) int { return int(max(-1, min(1, x.arrived-y.arrived))) })
	p.chainClients()
	p.idle = len(p.clients) < a.joined
	p.followAnswers()
	p.workers = p.workers[:0]
	for i := range a.workers {
		if a.workers[i].attached {
			p.workers = append(p.workers, replayWorker{Worker: a.workers[i].Worker})
		}
	}
	p.costs = append(p.costs, make([]table, len(a.shapes)-len(p.costs))...)
	for i := range a.shapes {
		p.costs[i].fill(&a.shapes[i].costs, a.mostRows(), a.lanes()-1)
	}
	p.sentAt = append(p.sentAt[:0], make([]Time, n)...)
	p.result.countFrom, p.result.end, p.result.goal = n/4, n-n/8, Time(float64(a.evaluation.goal)/margin)
}

// chainClients links the requests of each client, and numbers the clients.
func (p *replay) chainClients() {
	numbers := make(map[batcher.ClientID]int, len(p.clients))
	p.clients = p.clients[:0]
	p.chain = append(p.chain[:0], make([]int32, len(p.window))...)
	for i := range p.window {
		r := &p.window[i]
		p.chain[i] = -1
		k, known := numbers[r.client]
		if !known {
			k = len(p.clients)
			numbers[r.client] = k
			p.clients = append(p.clients, replayClient{number: r.client, first: int32(i)})
		} else {
			p.chain[p.clients[k].last] = int32(i)
		}
		p.clients[k].last = int32(i)
		r.client = batcher.ClientID(k)
	}
}

// play begins a play.
func (p *replay) play(x plan) {
	p.advice.plan, p.advice.busy = x, 0
	b := p.batcher
	for i := range p.clients {
		c := &p.clients[i]
		b.ClientJoined(batcher.ClientID(i))
		c.next, c.answers, c.waits = c.first, c.answers[:0], false
	}
	if p.idle {
		b.ClientJoined(batcher.ClientID(len(p.clients)))
	}
	p.start, p.wake = p.now+1, batcher.Never
	p.now = p.start
	for i := range p.clients {
		p.schedule(i)
	}
	for i := range p.workers {
		p.workers[i].freeAt = 0
		b.WorkerReady(p.workers[i].Worker)
	}
	p.result = outcome{countFrom: p.result.countFrom, end: p.result.end, goal: p.result.goal}
}

// outcome ends a play: nothing is in flight any more.
func (p *replay) outcome() outcome {
	for i := range len(p.clients) + 1 {
		p.batcher.ClientJoined(batcher.ClientID(i)) // again, if it sent no more
		p.batcher.ClientLeft(batcher.ClientID(i))
	}
	for i := range p.workers {
		p.batcher.WorkerGone(p.workers[i].ID)
	}
	p.result.fill = float64(p.result.rows) / float64(max(1, p.result.batches*p.most))
	return p.result
}

// step plays what happens next. False: nothing is left.
func (p *replay) step() bool {
	at := min(p.wake, p.arrivals.first())
	for i := range p.workers {
		if x := &p.workers[i]; len(x.batches) > 0 {
			at = min(at, x.batches[0].end)
		}
	}
	if at == batcher.Never {
		return false
	}
	p.now = at
	for i := range p.workers {
		for x := &p.workers[i]; len(x.batches) > 0 && x.batches[0].end <= at; {
			p.finish(x)
		}
	}
	for p.arrivals.first() <= at {
		p.arrive(p.arrivals.pop())
	}
	d := p.batcher.Decide(at)
	for _, end := range d.Ended {
		p.answer(end.ID, at)
	}
	for i := range d.Dispatches {
		p.run(&d.Dispatches[i])
	}
	p.wake = d.Wake
	return true
}

// schedule sets when a client's next request comes, if that is known.
func (p *replay) schedule(i int) {
	c := &p.clients[i]
	if c.next < 0 {
		return
	}
	at := p.start + p.window[c.next].arrived - p.window[0].arrived
	if after := int(p.after[c.next]); after > 0 {
		if c.waits = after > len(c.answers); c.waits {
			return
		}
		at = c.answers[after-1] + p.pause[c.next]
	}
	p.arrivals.push(arrival{max(at, p.now), int32(i)})
}

func (p *replay) arrive(i int) {
	c := &p.clients[i]
	id := c.next
	r := &p.window[id]
	c.next = p.chain[id]
	p.sentAt[id] = p.now
	q := batcher.Request{
		ID: batcher.RequestID(id), Client: r.client, Rows: int(r.rows), Level: int(r.level), Arrived: p.now, Deadline: batcher.Never,
	}
	if r.budget > 0 {
		q.Deadline = p.now + r.budget
	}
	q.Dims[0] = uint32(r.shape)
	if err := p.batcher.Arrive(p.now, q); err != nil {
		p.answer(q.ID, p.now) // it was possible then, under another policy
	}
	if p.closed && c.next < 0 {
		p.batcher.ClientSendsNoMore(r.client) // or the others would wait for it
	}
	p.schedule(i)
}

// run lets a worker run a batch.
func (p *replay) run(d *batcher.Dispatch) {
	i := slices.IndexFunc(p.workers, func(x replayWorker) bool { return x.ID == d.Worker })
	x, start, others := &p.workers[i], p.now, 0
	if len(x.batches) >= max(1, x.Lanes) {
		start = max(start, x.freeAt)
	}
	for k := range p.workers {
		if k != i && p.workers[k].freeAt > start {
			others++
		}
	}
	costs := &p.costs[d.Dims[0]]
	if !costs.known {
		costs = &p.costs[0]
	}
	end := start + max(1, costs.of(d.PadTo, others))
	x.freeAt = max(x.freeAt, end)
	p.advice.busy++
	p.result.busy += end - start
	p.result.batches++
	p.result.rows += d.Rows
	at := len(x.batches)
	for at > 0 && x.batches[at-1].end > end { // lanes overtake each other
		at--
	}
	x.batches = slices.Insert(x.batches, at, replayBatch{d.Batch, start, end, slices.Clone(d.Requests)})
}

// finish ends the batch of a worker that ends first.
func (p *replay) finish(x *replayWorker) {
	b := x.batches[0]
	x.batches = slices.Delete(x.batches, 0, 1)
	p.advice.busy--
	p.batcher.BatchDone(x.ID, b.id, b.start, b.end)
	for _, id := range b.requests {
		p.answer(id, b.end)
	}
}

// answer counts a request, and lets its client send the next.
func (p *replay) answer(id batcher.RequestID, at Time) {
	latency := at - p.sentAt[id]
	if o := &p.result; int(id) >= o.countFrom && int(id) < o.end {
		o.counted++
		o.sum += float64(latency)
		o.squares += float64(latency) * float64(latency)
		if latency > o.goal {
			o.late++
		}
	}
	i := int(p.window[id].client)
	c := &p.clients[i]
	if c.answers = append(c.answers, at); c.waits {
		p.schedule(i)
	}
}
