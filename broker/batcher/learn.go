// SPDX-License-Identifier: Apache-2.0

package batcher

import (
	"math"
	"time"

	"github.com/ringbatch/ringbatch/policy"
)

// With wait_time "auto" the batcher chooses the wait by trying: several times a
// second it takes the requests of about the last second, plays them through a
// second Batcher once for each of a few waits, with the batch times that it has
// learned, and from then on waits as the best of them did. So whatever the
// requests do (come evenly, in bursts, or each after the answer to the last),
// whatever a batch costs and however many workers share it, the wait is the one
// that would have been best a moment ago.
//
//	learn.go   what is remembered, and when to play it again
//	costs.go   what a batch takes
//	replay.go  one play through
//	follow.go  which requests wait for which answers in it
//	loop.go    whether they wait for answers at all
//	waits.go   which waits are tried, and which is taken
//	tails.go   how slow the slowest are
//	packing.go, admission.go, hopeless.go   what is refused, with a goal and without
//
// It is as pure as the rest: all of it follows from the events and their times.
type learner struct {
	settings policy.Settings
	auto     bool
	wait     Time // in force

	shapes  []shapeCosts // the first few shapes; [0] is all of them together
	workers []workerPace // by WorkerID
	clients []clientPace // by ClientID
	joined  int          // clients that are there
	busy    int          // workers that have a batch
	took    float64      // by a batch lately, on average
	least   float64      // by a batch lately, the quickest
	floor   floor
	packing packing
	// turnaround is the time from when a worker is done with a batch until it is given
	// the next, if one waits: what a batch takes is counted from there.
	turnaround float64
	limitAt    Time       // when a request was last taken at the limit of what could be in time
	decisions  uint       // so far
	runs       []pacedRun // a ring of the latest batches
	ran        int        // batches so far

	records  []record // a ring of the latest requests
	count    int      // requests so far
	latestAt Time     // when the last of them came
	skipped  Time     // of pauses so far, by which the learner's clock is behind
	recordOf []int    // by RequestID: its number, as in count

	table        costTable                        // for late
	hopes        [maxOthers + 1][sizeClasses]Time // by other busy workers
	tableAt      uint32
	tableWorkers int
	tableRows    int
	free         []Time
	rowEvery     float64 // nanoseconds between two rows that arrive, lately
	rowsEach     float64 // of a request, lately
	rowAt        Time    // the last arrival
	atTheLimit   bool    // of the request that late took last
	safety       float64 // how many times as long as expected batches are taken to last, by late

	waits      waits
	loop       loop
	replay     *replay
	lastNow    Time
	credit     float64
	hurryUntil Time // there is news: learn faster
	begun      Time // the evaluation in progress, or the last one
	begunAt    int  // count then
}

type shapeCosts struct {
	dims Dims
	costs
}

// workerPace is what a worker holds.
type workerPace struct {
	Worker
	here    bool
	freeAt  Time // when it finished last
	doneAt  uint // decisions then
	batches []pacedBatch
	sizes   []sizeSet // by shape: those that it was given
}

type pacedBatch struct {
	id         BatchID
	dispatched Time
	rows       int // that the worker sees
	others     int // workers that had a batch when this one was dispatched
	shape      int
	first      bool // of its size in its worker: it may be cold
	unanswered bool // nobody has a result of it
}

// pacedRun is when a worker was busy.
type pacedRun struct {
	worker   WorkerID
	from, to Time
}

// clientPace is how a client sends.
type clientPace struct {
	sent, answered uint32
	sentAt         Time // its last request
	sentSkip       Time // the pauses before it
	answeredAt     Time // its last answer; Never: since the last request, at an unknown time
	answeredSkip   Time // the pauses before it
	joined         bool
}

// record is one request as it came.
type record struct {
	arrived                Time
	skipped                Time // of pauses before it
	client                 ClientID
	rows                   int32
	sent                   uint32 // requests of its client before this one
	answered               uint32 // and how many of them were answered
	level                  uint8
	shape                  uint8
	follows                bool // an answer came since the client's last request
	sinceSend, sinceAnswer Time
	latency                Time // 0 if not known
	atTheLimit             bool // of what could be in time
}

const (
	maxRecords = 4096
	maxRuns    = 2048
	// maxTurnaround is longer than any that is the rule: the broker did not run.
	maxTurnaround = Time(time.Millisecond)
	// maxLearnedShapes have batch times of their own.
	maxLearnedShapes = 16
)

func newLearner(settings *policy.Settings) *learner {
	l := &learner{shapes: make([]shapeCosts, 1), safety: firstSafety, begun: math.MinInt64 / 2, lastNow: math.MinInt64 / 2}
	l.setPolicy(settings)
	return l
}

func (l *learner) setPolicy(settings *policy.Settings) {
	if settings.MaxBatchSize != l.settings.MaxBatchSize {
		l.packing.full, l.packing.seen = 0, 0
	}
	if settings.LatencyGoal != l.settings.LatencyGoal {
		l.safety = firstSafety
	}
	l.settings = settings.Clone()
	l.replay = nil
	l.table.known = false
	l.waits.setGoal(Time(settings.LatencyGoal))
	l.auto = settings.WaitTime == policy.Auto
	if !l.auto {
		l.wait = Time(settings.WaitTime)
		return
	}
	l.wait = l.waits.inForce()
	if l.records == nil {
		l.records = make([]record, maxRecords)
	}
}

func (l *learner) clientJoined(c ClientID) {
	l.clients = grown(l.clients, int(c))
	if p := &l.clients[c]; !p.joined {
		*p = clientPace{joined: true}
		l.joined++
	}
}

func (l *learner) clientLeft(c ClientID) {
	if int(c) < len(l.clients) && l.clients[c].joined {
		l.clients[c].joined = false
		l.joined--
	}
}

// arrived remembers a request that was queued, behind so many rows.
func (l *learner) arrived(r *Request, queuedRows int) {
	l.packing.arrived(r.Rows, queuedRows, l.settings.MaxBatchSize)
	if !l.auto {
		return
	}
	l.clientJoined(r.Client)
	l.skipPause(r.Arrived)
	if l.waits.goal > 0 && l.waits.closed {
		l.follow(r)
	}
	c := &l.clients[r.Client]
	x := record{
		arrived: r.Arrived, skipped: l.skipped, client: r.Client, rows: int32(r.Rows), level: uint8(r.Level),
		shape: uint8(l.shapeOf(&r.Dims)), sent: c.sent, answered: c.answered, atTheLimit: l.atTheLimit,
	}
	if c.sent > 0 {
		x.sinceSend = max(0, r.Arrived-c.sentAt-(l.skipped-c.sentSkip))
		if x.follows = c.answered > 0 && c.answeredAt >= c.sentAt; x.follows {
			x.sinceAnswer = max(0, r.Arrived-c.answeredAt-(l.skipped-c.answeredSkip)) // 0 if it is not known when
		}
	}
	c.sent++
	c.sentAt, c.sentSkip = r.Arrived, l.skipped
	l.records[l.count%maxRecords] = x
	l.recordOf = grown(l.recordOf, int(r.ID))
	l.recordOf[r.ID] = l.count
	l.count++
}

// skipPause takes a pause, in which no requests came, from the learner's clock: the
// load that goes on afterwards is known still, and no news. Nothing is in flight
// any more, so a replay finds the same with a shorter pause.
func (l *learner) skipPause(now Time) {
	if l.count > 0 && l.busy == 0 {
		l.skipped += max(0, now-l.latestAt-l.pause())
	}
	l.latestAt = max(l.latestAt, now)
}

// pause is how much of a pause counts.
func (l *learner) pause() Time { return max(shortestPause, 4*l.longest()) }

// clock is the time by the learner's clock, which stands still in a pause.
func (l *learner) clock(now Time) Time { return min(now, l.latestAt+l.pause()) - l.skipped }

// answered notes that a client has the answer to one of its requests, or will
// get none.
func (l *learner) answered(id RequestID, c ClientID, at Time) {
	if l.auto && int(c) < len(l.clients) {
		if int(id) < len(l.recordOf) && l.count-l.recordOf[id] < maxRecords && at != Never {
			r := &l.records[l.recordOf[id]%maxRecords]
			r.latency = max(1, at-r.arrived)
			if l.waits.goal > 0 {
				late := r.latency+l.handing() > l.waits.goal
				l.waits.ended(late)
				if r.atTheLimit {
					l.judge(late)
				}
			}
		}
		p := &l.clients[c]
		if p.answered < p.sent {
			p.answered++
		}
		p.answeredAt, p.answeredSkip = at, l.skipped
	}
}

func (l *learner) workerReady(w Worker) {
	l.workers = grown(l.workers, int(w.ID))
	x := &l.workers[w.ID]
	x.Worker, x.here = w, true
}

func (l *learner) workerGone(w WorkerID) {
	if int(w) < len(l.workers) && l.workers[w].here {
		x := &l.workers[w]
		if len(x.batches) > 0 {
			l.busy--
		}
		*x = workerPace{batches: x.batches[:0], sizes: x.sizes[:0]}
	}
}

func (l *learner) dispatched(d *Dispatch, now Time) {
	l.packing.dispatched(d)
	x := &l.workers[d.Worker]
	others := l.busy
	if len(x.batches) == 0 {
		l.busy++
		if x.freeAt > 0 && x.doneAt == l.decisions && l.cameBefore(d, x.freeAt) { // it was waited for
			l.turnaround += (float64(min(now-x.freeAt, maxTurnaround)) - l.turnaround) / 16
		} else {
			l.turnaround -= l.turnaround / 64
		}
	} else {
		others--
	}
	shape := l.shapeOf(&d.Dims)
	x.batches = append(x.batches, pacedBatch{id: d.Batch, dispatched: now, rows: d.PadTo, others: others, shape: shape, first: x.isNew(shape, d.PadTo)})
}

// cameBefore says whether the first request of a batch was there at a time. A broker
// with nothing to do looks at what workers have done only when the next request comes.
func (l *learner) cameBefore(d *Dispatch, at Time) bool {
	id := int(d.Requests[0])
	return id < len(l.recordOf) && l.count-l.recordOf[id] <= maxRecords && l.records[l.recordOf[id]%maxRecords].arrived <= at
}

// isNew says whether a worker has not run a size of a shape yet, and notes that it does.
func (x *workerPace) isNew(shape, rows int) bool {
	for len(x.sizes) <= shape {
		x.sizes = append(x.sizes, sizeSet{})
	}
	sizes, class := &x.sizes[shape], sizeClass(rows)
	was := sizes.has(class)
	sizes.add(class)
	return !was
}

// unanswered notes that a batch may not have been computed.
func (l *learner) unanswered(w WorkerID, id BatchID) {
	if int(w) >= len(l.workers) {
		return
	}
	for i := range l.workers[w].batches {
		if p := &l.workers[w].batches[i]; p.id == id {
			p.unanswered = true
		}
	}
}

// learnRun learns what a batch took. One that nobody has a result of and that was
// far too quick was given up, not computed, and tells nothing; one that was quick
// may have been, and does not tell what others take at least.
func (l *learner) learnRun(p *pacedBatch, from, finished Time) {
	took := finished - from
	quick := func(by float64) bool { return p.unanswered && float64(took) < l.expectedOf(p)*math.Exp(-by) }
	if quick(veryFarOff) {
		return
	}
	computed := !quick(farOff)
	if l.took == 0 {
		l.took = float64(took)
	}
	l.took += (float64(took) - l.took) / 16
	if computed {
		if l.least += (float64(took) - l.least) / 64; float64(took) < l.least || l.least == 0 {
			l.least = float64(took)
		}
		l.floor.observe(p.rows, took, finished)
	}
	l.shapes[0].observe(p.rows, p.others, from, took, p.first)
	if p.shape > 0 {
		l.shapes[p.shape].observe(p.rows, p.others, from, took, p.first)
	}
}

// expectedOf is about what a batch takes, by its shape if that is known.
func (l *learner) expectedOf(p *pacedBatch) float64 {
	if c := &l.shapes[p.shape]; c.known() {
		return c.expected(p.rows, p.others)
	}
	return l.shapes[0].expected(p.rows, p.others)
}

// done learns what a batch took: from when the worker could begin with it.
func (l *learner) done(w WorkerID, id BatchID, finished Time) {
	x := &l.workers[w]
	for i := range x.batches {
		p := x.batches[i]
		if p.id != id {
			continue
		}
		from := p.dispatched
		if x.Lanes <= 1 {
			from = max(from, x.freeAt)
		}
		l.runs = grown(l.runs, maxRuns-1)
		l.runs[l.ran%maxRuns] = pacedRun{w, from, finished}
		l.ran++
		l.learnRun(&p, from, finished)
		x.freeAt, x.doneAt = max(x.freeAt, finished), l.decisions
		x.batches = append(x.batches[:i], x.batches[i+1:]...)
		if len(x.batches) == 0 {
			l.busy--
		}
		return
	}
}

// shapeOf is the place of a shape in shapes; 0 for those that have none.
func (l *learner) shapeOf(d *Dims) int {
	if *d == (Dims{}) {
		return 0
	}
	for i := 1; i < len(l.shapes); i++ {
		if l.shapes[i].dims == *d {
			return i
		}
	}
	if len(l.shapes) > maxLearnedShapes {
		return 0
	}
	l.shapes = append(l.shapes, shapeCosts{dims: *d})
	return len(l.shapes) - 1
}

// The replay may take this share of the time, and so many steps at once.
const (
	stepEvery     = float64(8 * time.Microsecond) // a step takes about 0.15 µs: 2 %
	maxSteps      = 64
	hurry         = 4 // times as often for a second after news
	evaluateEach  = Time(10 * time.Millisecond)
	remembered    = Time(time.Second)
	shortestPause = remembered / 8
	fewRecords    = 16
	someRecords   = 384
	// windowBatches is how many of the quickest batches a window lasts at least, if the
	// requests of that time can be remembered: in a shorter one waits differ less than
	// they do in truth.
	windowBatches = 64
	// evaluateAnyway is when a few new requests are enough: after a busy time the
	// many that are usual would take long to come.
	evaluateAnyway = remembered / 4
)

// step goes on with the replay for as long as may be now, and begins a new one
// when it is time.
func (l *learner) step(now Time) {
	if !l.auto {
		return
	}
	every := stepEvery
	if now < l.hurryUntil {
		every /= hurry
	}
	l.credit = min(l.credit+float64(now-l.lastNow)/every, maxSteps)
	l.lastNow = now
	if l.replay == nil || !l.replay.running {
		if now < l.begun+evaluateEach || l.count-l.begunAt < fewRecords/2 {
			return
		}
		n := l.windowSize(now)
		if n < fewRecords || !l.shapes[0].known() || l.count-l.begunAt < min(n/2, someRecords/2) && now < l.begun+evaluateAnyway {
			return
		}
		l.begin(now, n)
	}
	for ; l.credit >= 1; l.credit-- {
		if l.replay.step() {
			continue
		}
		result := l.replay.result()
		l.waits.tried(&result)
		if !l.replay.again(l.waits.next()) {
			l.waits.choose()
			l.wait = l.waits.inForce()
			return
		}
	}
}

// windowSize is how many of the latest requests are played again: those of the
// last second, some in any case, and at least enough for a few batches.
func (l *learner) windowSize(now Time) int {
	now = l.clock(now)
	have := min(l.count, maxRecords)
	n := 0
	for n < have && (n < fewRecords || l.latest(n).clock() > now-remembered) {
		n++
		if n >= someRecords && n%64 == 0 {
			span := now - l.latest(n-1).clock()
			if span > windowBatches*l.quickest() {
				break
			}
		}
	}
	return n
}

// latest is the i-th last record, from 0.
func (l *learner) latest(i int) *record { return &l.records[(l.count-1-i)%maxRecords] }

// clock is when a request came, by the learner's clock.
func (r *record) clock() Time { return r.arrived - r.skipped }

// quickest is about what the smallest batch takes.
func (l *learner) quickest() Time { return Time(max(1, l.least)) }

func (l *learner) begin(now Time, n int) {
	l.begun, l.begunAt = now, l.count
	if l.replay == nil {
		l.replay = newReplay(l)
	}
	l.replay.load(n)
	l.waits.closed = l.replay.closed
	l.refreshTable()
	clock := l.clock(now)
	if l.waits.plan(clock, l.quickest()/64, l.longest(), n, clock-l.latest(n-1).clock(), l.expected(l.settings.MaxBatchSize)) {
		l.hurryUntil = now + remembered
	}
	l.replay.again(l.waits.next())
}

// longest is the longest wait that is worth a try.
func (l *learner) longest() Time {
	if l.waits.goal > 0 {
		return l.waits.goal
	}
	return Time(2.5 * max(l.took, l.least))
}
