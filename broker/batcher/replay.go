// SPDX-License-Identifier: Apache-2.0

package batcher

import (
	"slices"

	"github.com/ringbatch/ringbatch/policy"
)

// replay plays remembered requests through a Batcher of its own, with one fixed
// wait at a time.
type replay struct {
	from    *learner
	batcher *Batcher
	running bool
	moves   uint32 // those of costs when it was loaded
	leaps   uint32

	// What counts is the middle: it begins with nothing in flight, and ends
	// with nothing behind.
	countFrom, countTo int

	window    []record
	follow    []int32 // by record: the next one of the same client, or -1
	first     []int32 // by client of the window: its first record
	answersOf []int32 // by client of the window: where its answers begin in answers
	ends      []Time  // of answersTo
	feedback  feedback
	locals    []int32 // by ClientID: 1 + its number in the window; 0 for those not in it
	named     []ClientID
	closed    bool // clients send when they have their answer; otherwise when they please
	phantom   bool // a client is there that has not sent anything lately

	// One play.
	start     Time // of the window, on the replay's clock, which never goes back
	now       Time
	lag       Time // until the broker sees what others did
	wake      Time
	arrivals  minHeap // by client: when its next request is seen
	clients   []replayClient
	workers   []replayWorker
	costs     []costTable // by shape
	sum       float64     // of the latencies
	latencies latencies
	busyTime  Time
	sent      int // batches
	rows      int // in them
	counted   int
	late      int // took longer than due
	over      int // took longer than the goal
	due, goal Time
	sentAt    []Time // by record
	answers   []Time // of each client, in order: when it was answered
}

type replayClient struct {
	next      int32 // record, or -1
	sentFirst uint32
	answered  uint32
	sentAt    Time
	waits     bool // next comes after an answer that is not there yet
}

type replayWorker struct {
	Worker       // as it was when the replay began: the real one may leave meanwhile
	busyFor Time // when the window begins
	away    bool // until freeAt: busy with what came before the window
	freeAt  Time
	batches []replayBatch
	spare   [][]RequestID
}

type replayBatch struct {
	id         BatchID
	start, end Time
	requests   []RequestID
}

func newReplay(l *learner) *replay {
	s := l.settings.Clone()
	s.Buckets = nil
	for i := range s.Levels {
		s.Levels[i] = policy.Level{}
	}
	s.WaitTime, s.LatencyGoal = 0, 0
	b, err := newBatcher(s)
	if err != nil {
		panic(err) // the settings are those of a batcher that runs
	}
	return &replay{from: l, batcher: b, moves: l.shapes[0].moves, leaps: l.shapes[0].leaps}
}

// load takes the latest n requests.
func (p *replay) load(n int) {
	p.moves, p.leaps = p.from.shapes[0].moves, p.from.shapes[0].leaps
	p.lag = Time(p.from.turnaround)
	p.window = p.window[:0]
	for i := n - 1; i >= 0; i-- {
		p.window = append(p.window, *p.from.latest(i))
	}
	slices.SortStableFunc(p.window, func(a, b record) int { return int(max(-1, min(1, a.clock()-b.clock()))) })
	began := p.window[0].arrived
	for i := range p.window {
		p.window[i].arrived = p.window[i].clock()
	}
	for _, c := range p.named {
		p.locals[c] = 0
	}
	p.named = p.named[:0]
	p.first = p.first[:0]
	p.follow = append(p.follow[:0], make([]int32, n)...)
	p.locals = grown(p.locals, len(p.from.clients)-1)
	last := make([]int32, 0, 64)
	for i := range p.window {
		p.follow[i] = -1
		c := p.window[i].client
		if p.locals[c] == 0 {
			p.named = append(p.named, c)
			p.locals[c] = int32(len(p.named))
			p.first = append(p.first, int32(i))
			last = append(last, int32(i))
		} else {
			p.follow[last[p.locals[c]-1]] = int32(i)
			last[p.locals[c]-1] = int32(i)
		}
		p.window[i].client = ClientID(p.locals[c] - 1)
	}
	p.countFrom, p.countTo = n/4, n-n/16
	for end := p.window[n-1].arrived - p.from.longest(); p.countTo > n*5/8 && p.window[p.countTo-1].arrived > end; {
		p.countTo--
	}
	p.phantom = len(p.named) < p.from.joined
	p.from.loop.observe(p.seeFeedback())
	p.closed = p.from.loop.closed()
	if p.closed {
		p.takeAtOnce()
		p.followAnswers()
	}
	p.workers = p.workers[:0]
	most := p.batcher.settings.MaxBatchSize
	for i := range p.from.workers {
		if x := &p.from.workers[i]; x.here {
			p.workers = append(p.workers, replayWorker{Worker: x.Worker, busyFor: p.from.busyFor(WorkerID(i), began)})
			most = max(most, x.PadTo)
		}
	}
	for len(p.costs) < len(p.from.shapes) {
		p.costs = append(p.costs, costTable{})
	}
	for i := range p.from.shapes {
		p.costs[i].fill(&p.from.shapes[i].costs, most, len(p.workers)-1)
	}
	p.sentAt = append(p.sentAt[:0], make([]Time, n)...)
	p.answers = append(p.answers[:0], make([]Time, n)...)
	p.answersOf = p.answersOf[:0]
	before := int32(0)
	for _, first := range p.first {
		p.answersOf = append(p.answersOf, before)
		for i := first; i >= 0; i = p.follow[i] {
			before++
		}
	}
}

// again begins a play with the wait of a rung. False for none.
func (p *replay) again(rung int) bool {
	p.running = rung >= 0
	if !p.running {
		return false
	}
	b := p.batcher
	b.settings.WaitTime = p.from.waits.wait(rung)
	if b.heldFor, b.heldFrom = 0, Never; rung == apart {
		b.heldFor = p.from.longestHold()
	}
	for i := range b.clients {
		b.ClientJoined(ClientID(i)) // again, if it sent no more
		b.ClientLeft(ClientID(i))
	}
	for i := range b.workers {
		b.WorkerGone(WorkerID(i))
	}
	p.start = p.now + 1
	p.now = p.start
	p.wake = Never
	p.clients = append(p.clients[:0], make([]replayClient, len(p.named))...)
	for i := range p.clients {
		c := &p.clients[i]
		c.next = p.first[i]
		c.sentFirst = p.window[c.next].sent
		b.ClientJoined(ClientID(i))
		p.schedule(i)
	}
	if p.phantom {
		b.ClientJoined(ClientID(len(p.clients)))
	}
	p.sum, p.busyTime, p.sent, p.rows, p.counted, p.late, p.over = 0, 0, 0, 0, 0, 0, 0
	p.latencies = latencies{}
	way := p.from.handing(p.from.waits.goal) // back from the worker
	p.due, p.goal = p.from.waits.due()-way, p.from.waits.goal-way
	for i := range p.workers {
		x := &p.workers[i]
		x.freeAt = p.start + x.busyFor
		if x.away = x.busyFor > 0; !x.away {
			b.WorkerReady(x.Worker)
		}
	}
	return true
}

// step plays what happens next. False: nothing is left.
func (p *replay) step() bool {
	at := p.wake
	if !p.arrivals.empty() {
		at = min(at, Time(p.arrivals.min().key))
	}
	for i := range p.workers {
		if x := &p.workers[i]; x.away {
			at = min(at, x.freeAt+p.lag)
		} else if len(x.batches) > 0 {
			at = min(at, x.batches[0].end+p.lag)
		}
	}
	if at == Never {
		p.running = false
		return false
	}
	p.now = at
	for i := range p.workers {
		x := &p.workers[i]
		if x.away && x.freeAt+p.lag <= at {
			x.away = false
			p.batcher.WorkerReady(x.Worker)
		}
		for len(x.batches) > 0 && x.batches[0].end+p.lag <= at {
			p.finish(x)
		}
	}
	for !p.arrivals.empty() && Time(p.arrivals.min().key) <= at {
		p.arrive(int(p.arrivals.min().id))
	}
	d := p.batcher.Decide(at)
	for i := range d.Dispatches {
		p.dispatch(&d.Dispatches[i])
	}
	p.wake = d.Wake
	return true
}

func (p *replay) arrive(i int) {
	p.arrivals.remove(uint32(i))
	c := &p.clients[i]
	id := c.next
	r := &p.window[id]
	c.next = p.follow[id]
	sent := p.now - p.lag
	c.sentAt, p.sentAt[id] = sent, sent
	q := Request{ID: RequestID(id), Client: r.client, Rows: int(r.rows), Level: int(r.level), Arrived: sent, Deadline: Never}
	if r.patience > 0 {
		q.Deadline = max(sent+2*r.patience, p.now+1) // it waits for others for half of that
	}
	if r.shape > 0 {
		q.Dims[0] = uint32(r.shape)
	}
	if err := p.batcher.Arrive(p.now, q); err != nil {
		p.answer(i, p.now) // it was possible then, under another policy
	}
	if p.closed && c.next < 0 {
		p.batcher.sendsNoMore(ClientID(i)) // or the others would wait for it until the window's end
	}
	p.schedule(i)
}

func (p *replay) dispatch(d *Dispatch) {
	x := &p.workers[0]
	for i := range p.workers {
		if p.workers[i].ID == d.Worker {
			x = &p.workers[i]
		}
	}
	start := p.now
	if len(x.batches) >= max(1, x.Lanes) {
		start = max(start, x.freeAt)
	}
	end := start + p.cost(d.PadTo, int(d.Dims[0]), p.othersAt(x, start+p.lag))
	x.freeAt = max(x.freeAt, end)
	p.busyTime += end - start
	p.sent++
	p.rows += d.Rows
	var ids []RequestID
	if n := len(x.spare); n > 0 {
		ids, x.spare = x.spare[n-1], x.spare[:n-1]
	}
	x.batches = append(x.batches, replayBatch{d.Batch, start, end, append(ids[:0], d.Requests...)})
	for i := len(x.batches) - 1; i > 0 && x.batches[i].end < x.batches[i-1].end; i-- { // lanes overtake each other
		x.batches[i], x.batches[i-1] = x.batches[i-1], x.batches[i]
	}
}

// othersAt is how many workers other than x are busy when a batch that was handed over
// begins.
func (p *replay) othersAt(x *replayWorker, at Time) (n int) {
	for i := range p.workers {
		if y := &p.workers[i]; y != x && y.freeAt > at {
			n++
		}
	}
	return n
}

// finish ends the batch of a worker that ends first.
func (p *replay) finish(x *replayWorker) {
	b := x.batches[0]
	copy(x.batches, x.batches[1:])
	x.batches = x.batches[:len(x.batches)-1]
	p.batcher.BatchDone(x.ID, b.id, b.start, b.end)
	for _, id := range b.requests {
		latency := b.end - p.sentAt[id]
		if int(id) >= p.countFrom && int(id) < p.countTo {
			p.sum += float64(latency)
			p.latencies.note(latency)
			p.counted++
			if latency > p.due {
				p.late++
			}
			if latency > p.goal {
				p.over++
			}
		}
		i := int(p.window[id].client)
		p.answer(i, b.end)
		if p.clients[i].waits {
			p.schedule(i)
		}
	}
	x.spare = append(x.spare, b.requests)
}

// cost is what a batch is expected to take.
func (p *replay) cost(rows, shape, others int) Time {
	if !p.costs[shape].known {
		shape = 0
	}
	return p.costs[shape].of(rows, others)
}

// result is what the play found.
func (p *replay) result() outcome {
	return outcome{
		sum: p.sum, latencies: p.latencies, busy: float64(p.busyTime),
		filled: float64(p.rows) / float64(max(1, p.sent*p.batcher.settings.MaxBatchSize)),
		late:   float64(p.late) / float64(max(1, p.counted)), over: float64(p.over) / float64(max(1, p.counted)), n: 1,
	}
}

// busyFor is how long a worker was still busy at a time in the past.
func (l *learner) busyFor(w WorkerID, at Time) Time {
	for i := 1; i <= min(l.ran, maxRuns); i++ {
		run := &l.runs[(l.ran-i)%maxRuns]
		if run.worker != w {
			continue
		}
		if run.from <= at {
			return max(0, run.to-at)
		}
	}
	return 0
}
