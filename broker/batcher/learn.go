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
//	learn.go     what is remembered
//	runs.go      what workers did
//	costs.go     what a batch takes (costtable.go: also where it was not seen, cold.go: which
//	             of it is believed, news.go: when all of it
//	             becomes another, ceiling.go: how much it may be at most)
//	evaluate.go  when to play it again (change.go: and how far back)
//	replay.go    one play through
//	follow.go    which requests wait for which answers in it
//	loop.go      whether they wait for answers at all
//	waits.go     which waits are tried, and which is taken (apart.go: or one batch after the other)
//	tails.go     how slow the slowest are
//	admission.go what is refused (packing.go: how the queue divides, floor.go: the quickest
//	             batches, ownshape.go: those of one shape)
//
// It is as pure as the rest: all of it follows from the events and their times.
type learner struct {
	settings policy.Settings
	auto     bool
	wait     Time // in force
	apart    bool // in force, too (apart.go)

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
	changed  int      // the first of them after a change of the load
	firstAt  Time     // when the first of them came
	latestAt Time     // and the last
	skipped  Time     // of pauses so far, by which the learner's clock is behind
	recordOf []int    // by RequestID: its number, as in count

	table        costTable                        // for late
	hopes        [maxOthers + 1][sizeClasses]Time // by other busy workers
	longestHope  Time
	tableAt      uint32 // batches when it was made
	tableTime    Time   // and latestEnd
	latestEnd    Time   // of a batch
	tableWorkers int
	tableRows    int
	free         []Time
	hand         Time    // what handing over a batch takes, for the request that late looks at
	patient      Time    // how long the request that was queued last may wait for others; Never: as long as it likes
	rowEvery     float64 // nanoseconds between two rows that arrive, lately
	rowsEach     float64 // of a request, lately
	rowAt        Time    // the last arrival
	// Of the request that late took last: when it must be answered, if it was taken at the
	// limit of what could be in time; Never if it was not; 0 if there is no such time.
	limit  Time
	limits []Time  // the same by RequestID
	safety float64 // how many times as long as expected batches are taken to last, by late

	waits      waits
	loop       loop
	replay     *replay
	lastNow    Time
	credit     float64
	hurryUntil Time // there is news: learn faster
	stepUntil  Time // load or cost have become others at once
	leapUntil  Time // batches came to take twice as long, or half, lately
	begun      Time // the evaluation in progress, or the last one
	begunAt    int  // count then
	anew       bool // it was begun anew: it is finished in any case, or with batches that differ by chance none would be
}

type shapeCosts struct {
	dims Dims
	costs
	floor floor
}

// clientPace is how a client sends.
type clientPace struct {
	sent, answered uint32
	sentAt         Time // its last request
	sentSkip       Time // the pauses before it
	answeredAt     Time // its last answer; Never: since the last request, at an unknown time
	answeredSkip   Time // the pauses before it
	wanted         Time // when it was first refused what it tries again; 0: nothing
	refusedAt      Time // and last
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
	refused                Time // since its client was first refused what it tried again
	patience               Time // how long it would wait for others at most; 0 if it has no deadline
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
	anotherSize, anotherGoal := settings.MaxBatchSize != l.settings.MaxBatchSize, settings.LatencyGoal != l.settings.LatencyGoal
	if anotherSize {
		l.packing.full, l.packing.seen = 0, 0
	}
	if anotherGoal {
		l.safety = firstSafety
	}
	if anotherSize || anotherGoal { // what was found is of other batches, or of other waits
		l.waits = waits{goal: Time(settings.LatencyGoal)}
	}
	l.settings = settings.Clone()
	l.replay, l.anew = nil, false
	l.table.known = false
	l.auto = settings.WaitTime == policy.Auto
	if !l.auto {
		l.wait, l.apart, l.waits.closed = Time(settings.WaitTime), false, false
		return
	}
	l.waits.leaveApart()
	l.enforce()
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
	if l.limit != 0 {
		l.limits = grown(l.limits, int(r.ID))
	}
	if int(r.ID) < len(l.limits) {
		l.limits[r.ID] = l.limit
	}
	if !l.auto {
		return
	}
	l.clientJoined(r.Client)
	l.skipPause(r.Arrived)
	if l.waits.closed && (l.waits.goal > 0 || r.Deadline != Never) {
		l.follow(r)
	}
	c := &l.clients[r.Client]
	x := record{
		arrived: r.Arrived, skipped: l.skipped, client: r.Client, rows: int32(r.Rows), level: uint8(r.Level),
		shape: uint8(l.shapeOf(&r.Dims)), sent: c.sent, answered: c.answered,
	}
	if r.Deadline != Never {
		x.patience = max(1, l.patient)
	}
	if c.wanted > 0 && l.triesAgain(c, r) {
		x.refused = max(0, r.Arrived-c.wanted)
	}
	c.wanted = 0
	came := r.Arrived - x.refused
	if c.sent > 0 {
		x.sinceSend = max(0, came-c.sentAt-(l.skipped-c.sentSkip))
		if x.follows = c.answered > 0 && c.answeredAt >= c.sentAt; x.follows {
			x.sinceAnswer = max(0, came-c.answeredAt-(l.skipped-c.answeredSkip)) // 0 if it is not known when
		}
	}
	c.sent++
	c.sentAt, c.sentSkip = came, l.skipped
	if l.count == 0 {
		l.firstAt = r.Arrived
	}
	l.records[l.count%maxRecords] = x
	l.recordOf = grown(l.recordOf, int(r.ID))
	l.recordOf[r.ID] = l.count
	l.count++
}

// wasRefused notes that a client that sends when it is answered was refused. It tries
// again, and the time until it is taken is not of its own choice: replays, which refuse
// nobody, have its request come when it came first.
func (l *learner) wasRefused(r *Request) {
	if !l.waits.closed || int(r.Client) >= len(l.clients) {
		return
	}
	c := &l.clients[r.Client]
	if c.wanted == 0 || !l.triesAgain(c, r) {
		c.wanted = r.Arrived
	}
	c.refusedAt = r.Arrived
}

// triesAgain says whether a request is the one that was refused.
func (l *learner) triesAgain(c *clientPace, r *Request) bool {
	return r.Arrived-c.refusedAt < max(l.waits.goal, shortestPause)
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
	l.ended(id, at)
	if l.auto && int(c) < len(l.clients) {
		if int(id) < len(l.recordOf) && l.count-l.recordOf[id] < maxRecords && at != Never {
			r := &l.records[l.recordOf[id]%maxRecords]
			r.latency = max(1, at-r.arrived)
			if l.waits.goal > 0 {
				l.waits.ended(r.latency+l.handing(l.waits.goal) > l.waits.goal)
			}
		}
		p := &l.clients[c]
		if p.answered < p.sent {
			p.answered++
		}
		p.answeredAt, p.answeredSkip = at, l.skipped
	}
}
