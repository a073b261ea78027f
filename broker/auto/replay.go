// SPDX-License-Identifier: Apache-2.0

package auto

import (
	"cmp"
	"slices"

	"github.com/ringbatch/ringbatch/broker/batcher"
	"github.com/ringbatch/ringbatch/policy"
)

// replay plays the latest requests through a second batcher, with one plan at a time and the known costs.
type replay struct {
	batcher  *batcher.Batcher
	settings policy.Settings // of the batcher
	advice   replayAdvice
	requests []replayRequest // by arrival
	clients  []replayClient
	closed   bool // clients send when they are answered
	someIdle bool // a client is there that has not sent lately
	goal     Time // latency goal, less a margin
	maxBatch int
	largest  int     // size of a batch that costs has
	costs    []table // by shape
	workers  []replayWorker

	// One play. Its clock goes on from play to play.
	start, now    Time
	wake          Time
	events        []event // latest first; the first is none
	result        outcome
	rows, batches int
}

type replayRequest struct {
	record      // client is a number in the replay
	next   int  // of the same client; -1: none
	after  int  // it follows that answer to its client, from 1; 0: it comes at its own time
	pause  Time // from that answer to the request
	sentAt Time // in the play
}

type replayClient struct {
	first, last int // requests
	// In the play.
	next    int // request; -1: none
	answers []Time
	waits   bool // next follows an answer that is not there yet
}

// event is the next request of a client, or the end of a batch.
type event struct {
	at       Time
	client   int
	worker   batcher.WorkerID
	batch    batcher.BatchID // 0: a request
	requests []batcher.RequestID
}

type replayWorker struct {
	batcher.Worker
	freeAt Time
	held   int // batches
}

// outcome sums up the requests in the middle of a play.
type outcome struct {
	counted float64
	latency float64 // of all of them, in nanoseconds
	late    float64 // of them missed the goal
	busy    float64 // nanoseconds, of the workers
	fill    float64 // of the batches, as a share of max_batch_size
}

// add fades this outcome to the share kept, and adds another.
func (o *outcome) add(kept float64, x *outcome) {
	o.counted, o.latency, o.late = o.counted*kept+x.counted, o.latency*kept+x.latency, o.late*kept+x.late
	o.busy, o.fill = o.busy*kept+x.busy, o.fill*kept+x.fill
}

// replayAdvice is the advisor of the replay's batcher.
type replayAdvice struct {
	batcher.FixedWait
	plan    plan
	running int // batches
}

func (x *replayAdvice) WaitFor(Time, Time, batcher.Queue) Time { return x.plan.wait }

func (x *replayAdvice) HoldUntil(Time) Time {
	if x.plan.oneAtATime && x.running > 0 {
		return batcher.Never
	}
	return 0
}

func newReplay(settings policy.Settings) *replay {
	s := settings.Clone()
	s.Buckets, s.WaitTime, s.LatencyGoal = nil, 0, 0
	for i := range s.Levels {
		s.Levels[i] = policy.Level{}
	}
	p := &replay{settings: s, events: []event{{at: batcher.Never}}}
	p.batcher, _ = batcher.NewAdvised(s, &p.advice) // the settings are those of a batcher that runs
	return p
}

// load takes the latest n requests, the workers and the costs.
func (p *replay) load(a *Advisor, n int) {
	p.requests, p.clients = p.requests[:0], p.clients[:0]
	for i := n - 1; i >= 0; i-- {
		p.requests = append(p.requests, replayRequest{record: *a.latest(i), next: -1})
	}
	slices.SortStableFunc(p.requests, func(x, y replayRequest) int { return cmp.Compare(x.arrived, y.arrived) })
	numbers := map[batcher.ClientID]int{}
	for i := range p.requests {
		r := &p.requests[i]
		k, known := numbers[r.client]
		if known {
			p.requests[p.clients[k].last].next = i
		} else {
			k = len(p.clients)
			numbers[r.client] = k
			p.clients = append(p.clients, replayClient{first: i})
		}
		p.clients[k].last = i
		r.client = batcher.ClientID(k)
	}
	p.followAnswers()
	p.someIdle = len(p.clients) < a.clients
	p.goal, p.maxBatch = Time(float64(a.evaluation.goal)/(1+caution)), a.settings.MaxBatchSize
	p.largest = p.maxBatch
	p.workers = append(p.workers[:0], make([]replayWorker, len(a.workers))...)
	for i := range a.workers {
		p.workers[i].Worker = a.workers[i].Worker
		p.largest = max(p.largest, a.workers[i].PadTo)
	}
	p.costs = grown(p.costs, len(a.shapes)-1)
	for i := range a.shapes {
		if !p.costs[i].fill(&a.shapes[i].costs, p.largest, a.lanes()-1) {
			p.costs[i] = p.costs[max(0, i-1)] // until a batch of that shape was seen
		}
	}
}

func (p *replay) beginPlay(x plan) {
	p.advice.plan, p.result, p.rows, p.batches = x, outcome{}, 0, 0
	p.start, p.wake = p.now+1, batcher.Never
	p.now = p.start
	for i := range p.clients {
		c := &p.clients[i]
		p.batcher.ClientJoined(batcher.ClientID(i))
		c.next, c.answers, c.waits = c.first, c.answers[:0], false
		p.scheduleRequest(i)
	}
	if p.someIdle {
		p.batcher.ClientJoined(batcher.ClientID(len(p.clients)))
	}
	for i := range p.workers {
		if x := &p.workers[i]; x.Lanes > 0 {
			x.freeAt = 0
			p.batcher.WorkerReady(x.Worker)
		}
	}
}

// endPlay ends a play of which nothing is left.
func (p *replay) endPlay() outcome {
	for i := range len(p.clients) + 1 {
		p.batcher.ClientJoined(batcher.ClientID(i)) // again, if it sent no more
		p.batcher.ClientLeft(batcher.ClientID(i))
	}
	for i := range p.workers {
		p.batcher.WorkerGone(batcher.WorkerID(i))
	}
	p.result.fill = float64(p.rows) / float64(max(1, p.batches*p.maxBatch))
	return p.result
}

// step plays what happens next. False: nothing is left.
func (p *replay) step() bool {
	at := min(p.wake, p.events[len(p.events)-1].at)
	if at == batcher.Never {
		return false
	}
	p.now = at
	for e := p.events[len(p.events)-1]; e.at <= at; e = p.events[len(p.events)-1] {
		if p.events = p.events[:len(p.events)-1]; e.batch > 0 {
			p.endBatch(&e)
		} else {
			p.sendRequest(e.client)
		}
	}
	d := p.batcher.Decide(at)
	for _, end := range d.Ended {
		p.answerRequest(end.ID, at)
	}
	for i := range d.Dispatches {
		p.runBatch(&d.Dispatches[i])
	}
	p.wake = d.Wake
	return true
}

func (p *replay) addEvent(e event) {
	place, _ := slices.BinarySearchFunc(p.events, e.at, func(x event, at Time) int { return cmp.Compare(at, x.at) })
	p.events = slices.Insert(p.events, place, e)
}

// scheduleRequest sets when a client's next request comes, if that is known.
func (p *replay) scheduleRequest(i int) {
	c := &p.clients[i]
	if c.next < 0 {
		return
	}
	r := &p.requests[c.next]
	at := p.start + r.arrived - p.requests[0].arrived
	if p.closed && r.after > 0 {
		if c.waits = r.after > len(c.answers); c.waits {
			return
		}
		at = c.answers[r.after-1] + r.pause
	}
	p.addEvent(event{at: max(at, p.now), client: i})
}

func (p *replay) sendRequest(i int) {
	c := &p.clients[i]
	id := c.next
	r := &p.requests[id]
	c.next, r.sentAt = r.next, p.now
	q := batcher.Request{
		ID: batcher.RequestID(id), Client: r.client, Rows: int(r.rows), Cost: int(r.cost), Level: int(r.level), Arrived: p.now,
		Deadline: batcher.Never,
	}
	if r.budget > 0 {
		q.Deadline = p.now + r.budget
	}
	q.Dims[0] = uint32(r.shape)
	if err := p.batcher.Arrive(p.now, q); err != nil {
		p.answerRequest(q.ID, p.now) // it was possible then, under another policy
	}
	if p.closed && c.next < 0 {
		p.batcher.ClientSendsNoMore(r.client) // or the others would wait for it
	}
	p.scheduleRequest(i)
}

func (p *replay) runBatch(d *batcher.Dispatch) {
	x, start, others := &p.workers[d.Worker], p.now, 0
	if x.held >= x.Lanes {
		start = max(start, x.freeAt)
	}
	for i := range p.workers {
		if batcher.WorkerID(i) != d.Worker && p.workers[i].freeAt > start {
			others++
		}
	}
	size := min(sizeOfBatch(&p.settings, d.PadTo, d.Cost), p.largest)
	end := start + max(1, p.costs[d.Dims[0]][min(others, maxOthers)][classOf(size)])
	x.freeAt, x.held = max(x.freeAt, end), x.held+1
	p.advice.running++
	p.batches, p.rows, p.result.busy = p.batches+1, p.rows+sizeOfBatch(&p.settings, d.Rows, d.Cost), p.result.busy+float64(end-start)
	p.addEvent(event{at: end, worker: d.Worker, batch: d.Batch, requests: slices.Clone(d.Requests)})
}

func (p *replay) endBatch(e *event) {
	p.workers[e.worker].held--
	p.advice.running--
	p.batcher.BatchDone(e.worker, e.batch, e.at, e.at)
	for _, id := range e.requests {
		p.answerRequest(id, e.at)
	}
}

// answerRequest counts a request, and lets its client send the next. The first quarter does not
// count, because the play began with nothing in flight, nor does the end.
func (p *replay) answerRequest(id batcher.RequestID, at Time) {
	r, n := &p.requests[id], len(p.requests)
	if int(id) >= n/4 && int(id) < n-n/8 {
		p.result.counted++
		p.result.latency += float64(at - r.sentAt)
		if at-r.sentAt > p.goal {
			p.result.late++
		}
	}
	c := &p.clients[r.client]
	if c.answers = append(c.answers, at); c.waits {
		p.scheduleRequest(int(r.client))
	}
}

// followAnswers finds out whether clients send because they were answered. If so, and a client mostly has
// up to k requests in flight, its request n follows its answer n − k in the replay.
func (p *replay) followAnswers() {
	gaps, waits := Time(0), Time(0)
	var ends, starts []Time
	var inFlight []int
	for i := range p.clients {
		starts, ends, inFlight = starts[:0], ends[:0], inFlight[:0]
		for id := p.clients[i].first; id >= 0; id = p.requests[id].next {
			r := &p.requests[id]
			if starts = append(starts, r.arrived); r.latency > 0 {
				ends = append(ends, r.arrived+r.latency)
			}
		}
		slices.Sort(ends)
		for k, at := range starts {
			ended, _ := slices.BinarySearch(ends, at+1)
			inFlight = append(inFlight, k+1-ended)
		}
		slices.Sort(inFlight)
		from := -max(1, inFlight[len(inFlight)*7/8]) // not the most: a worker may report an answer after the client's next request
		for id := p.clients[i].first; id >= 0 && from < len(ends); id = p.requests[id].next {
			if r := &p.requests[id]; from >= 0 {
				r.after, r.pause = from+1, max(0, r.arrived-ends[from])
				gaps += r.arrived - starts[from]
				waits += ends[from] - starts[from]
			}
			from++
		}
	}
	// Clients that wait most of the time send because they were answered.
	p.closed = waits > 0 && gaps < 2*waits
}
