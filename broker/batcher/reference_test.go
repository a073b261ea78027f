// SPDX-License-Identifier: Apache-2.0

package batcher

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/ringbatch/ringbatch/policy"
)

// reference is the slow, obviously right scheduler: every rule written down as
// directly as it can be, with slices, sorting and searching from the start at
// every step. The random schedules compare the Batcher with it.
type reference struct {
	settings  policy.Settings
	waiting   []*refRequest // in commit order
	running   []*refRequest
	clients   map[ClientID]*refClient
	workers   []*refWorker
	nextSeq   int64
	lastSince Time
	lastBatch BatchID
	out       Decisions
	now       Time // of the last Decide
	heldFrom  Time // since when batches that are not full are held back
	advisor   testAdvisor
	credit    Time
	debtors   []*refClient
	lastGood  Time // when a request of a client came that is not in debt
}

type refRequest struct {
	Request           // Level resolved, Dims bucketed, Deadline shortened
	seq, firstSeq     int64
	tie               int64 // of requests whose deadlines pass together
	since, firstSince Time
	timeout           Time // Never once it has timed out or was requeued
	base              int  // its level; LevelCount() once delayed
	batch             BatchID
	client            *refClient
	wait              Time // in force when it began to wait, or as much as its deadline allows
}

type refClient struct {
	joined                  bool
	inFlight                int
	peak, lastPeak, endings int
	paid, cost              Time
	owes                    bool
}

type refWorker struct {
	Worker
	pass       int64
	batches    []BatchID
	dispatches []Dispatch // of these batches
	alone      bool       // it runs a retry whose worker died
}

func newReference(settings policy.Settings) (*reference, error) {
	if err := settings.Validate(); err != nil {
		return nil, err
	}
	b := &reference{settings: settings.Clone(), clients: map[ClientID]*refClient{}, heldFrom: Never, credit: credit, lastGood: -Never}
	b.advisor.SetPolicy(&settings)
	return b, nil
}

func (b *reference) SetPolicy(settings policy.Settings) error {
	if err := settings.Validate(); err != nil {
		return err
	}
	for _, r := range slices.Concat(b.waiting, b.running) {
		if r.Rows > settings.MaxBatchSize {
			return refuse("max_batch_size is %d, but a request of %d rows is in flight", settings.MaxBatchSize, r.Rows)
		}
		if r.Level >= settings.LevelCount() {
			return refuse("priorities is %d, but a request of level %d is in flight", settings.LevelCount(), r.Level)
		}
	}
	if len(b.waiting)+len(b.running) > 0 && fmt.Sprint(settings.Buckets) != fmt.Sprint(b.settings.Buckets) {
		return refuse("buckets cannot change while requests are in flight")
	}
	for _, r := range b.waiting {
		if r.base == b.settings.LevelCount() {
			r.base = settings.LevelCount()
		}
	}
	b.settings = settings.Clone()
	b.advisor.SetPolicy(&settings)
	for _, r := range b.waiting {
		r.wait = b.waitOf(r)
	}
	return nil
}

func (b *reference) Learn(now Time) { b.advisor.Learn(now) }

func (b *reference) client(c ClientID) *refClient {
	if b.clients[c] == nil {
		b.clients[c] = &refClient{}
	}
	return b.clients[c]
}

func (b *reference) ClientJoined(c ClientID) {
	b.client(c).joined = true
}

func (b *reference) ClientLeft(c ClientID) []RequestID {
	var gone []RequestID
	b.waiting = slices.DeleteFunc(b.waiting, func(r *refRequest) bool {
		if r.Client == c {
			gone = append(gone, r.ID)
		}
		return r.Client == c
	})
	b.debtors = slices.DeleteFunc(b.debtors, func(x *refClient) bool { return x == b.clients[c] })
	delete(b.clients, c) // its running requests keep the old record
	return gone
}

func (b *reference) WorkerReady(w Worker) {
	w.Share, w.Lanes = max(1, w.Share), max(1, w.Lanes)
	w.Depth = max(w.Lanes, w.Depth)
	b.advisor.WorkerReady(w)
	pass, found := int64(0), false
	for _, other := range b.workers {
		if !other.Paused && (!found || other.pass < pass) {
			pass, found = other.pass, true
		}
	}
	for _, old := range b.workers {
		if old.ID == w.ID {
			if old.Paused && !w.Paused {
				old.pass = max(old.pass, pass)
			}
			old.Worker = w
			return
		}
	}
	b.workers = append(b.workers, &refWorker{Worker: w, pass: pass})
}

func (b *reference) WorkerGone(w WorkerID) {
	if slices.ContainsFunc(b.workers, func(x *refWorker) bool { return x.ID == w }) {
		b.advisor.WorkerGone(w)
	}
	b.workers = slices.DeleteFunc(b.workers, func(x *refWorker) bool { return x.ID == w })
}

func (b *reference) Arrive(now Time, r Request) error {
	if r.Level == DefaultLevel {
		r.Level = b.settings.DefaultPriority
	}
	if r.Level < 0 || r.Level >= b.settings.LevelCount() {
		return ErrNoLevel
	}
	if r.Rows > b.settings.MaxBatchSize {
		return ErrTooLarge
	}
	r.Arrived = min(r.Arrived, now)
	policy := b.settings.Level(r.Level)
	dims, err := bucket(&b.settings, r.Dims)
	if err != nil {
		return err
	}
	r.Dims = dims
	if r.Cost == 0 {
		r.Cost = max(1, int(r.Dims[0]))
	}
	if policy.MaxTimeout > 0 {
		r.Deadline = min(r.Deadline, r.Arrived+Time(policy.MaxTimeout))
	}
	if r.Deadline <= now {
		return ErrExpired
	}
	if policy.MaxQueue > 0 && b.QueuedAt(r.Level) >= policy.MaxQueue {
		return ErrQueueFull
	}
	if b.advisor.IsLate(now, r, b.queueBefore(r.Level)) {
		return ErrLate
	}
	r.Avoid = avoidedBy(r)
	q := &refRequest{Request: r, base: r.Level, timeout: Never, client: b.client(r.Client)}
	if policy.DefaultTimeout > 0 {
		q.timeout = r.Arrived + Time(policy.DefaultTimeout)
	}
	b.nextSeq++
	b.lastSince = max(b.lastSince, r.Arrived)
	q.seq, q.firstSeq, q.tie = b.nextSeq, b.nextSeq, b.nextSeq
	q.since, q.firstSince = b.lastSince, b.lastSince
	q.client.joined = true
	q.client.inFlight++
	q.client.peak = max(q.client.peak, q.client.inFlight)
	b.came(now, q)
	b.waiting = append(b.waiting, q)
	q.wait = b.waitOf(q)
	b.advisor.RequestQueued(now, r)
	return nil
}

// queueBefore is the queue before a request of a level that arrives now.
func (b *reference) queueBefore(level int) Queue {
	n, q := 0, b.queue()
	for _, r := range b.waiting {
		if !r.client.owes && (b.settings.LevelCount() == 1 || r.Level <= level && b.settings.Level(r.Level).OnTimeout == policy.Reject) {
			n++
		}
	}
	all := max(1, q.Requests)
	return Queue{n, q.Rows * n / all, q.Cost * n / all, q.Clients}
}

// queue is what waits, without the requests of clients in debt.
func (b *reference) queue() (q Queue) {
	for _, r := range b.waiting {
		if !r.client.owes {
			q.Requests, q.Rows, q.Cost = q.Requests+1, q.Rows+r.Rows, q.Cost+r.Rows*r.Cost
		}
	}
	q.Clients = b.joined()
	return q
}

func avoidedBy(r Request) WorkerID {
	if r.Share == 0 {
		return NoWorker
	}
	return r.Avoid
}

func (b *reference) came(now Time, r *refRequest) {
	if !r.client.owes {
		b.lastGood = max(b.lastGood, now)
	}
}

func (b *reference) Charge(now Time, id ClientID, cost Time) {
	c := b.client(id)
	if !c.joined {
		return
	}
	if cost > 0 {
		c.cost = cost
		c.paid = min(max(c.paid, now)+8*cost, now+b.credit+max(b.credit, 8*cost))
	}
	if !c.owes && c.paid > now+b.credit {
		c.owes = true
		b.debtors = append(b.debtors, c)
	}
}

func (b *reference) Requeue(now Time, r Request) {
	for i, q := range b.running {
		if q.ID != r.ID {
			continue
		}
		b.running = slices.Delete(b.running, i, i+1)
		q.batch, q.base, q.timeout = 0, q.Level, Never
		q.seq, q.since, q.tie = q.firstSeq, q.firstSince, q.firstSeq
		b.came(now, q)
		q.Share, q.Avoid = r.Share, avoidedBy(r)
		b.waiting = append(b.waiting, q)
		q.wait = b.waitOf(q)
		slices.SortFunc(b.waiting, func(x, y *refRequest) int { return cmp.Compare(x.firstSeq, y.firstSeq) })
		return
	}
	panic("requeue of a request that is not running")
}

func (b *reference) Cancel(id RequestID) bool { return b.endWaiting(id, Never) }

func (b *reference) endWaiting(id RequestID, answered Time) bool {
	for i, r := range b.waiting {
		if r.ID == id {
			b.waiting = slices.Delete(b.waiting, i, i+1)
			b.end(r, answered)
			return true
		}
	}
	return false
}

func (b *reference) BatchDone(w WorkerID, batch BatchID, started, finished Time) {
	for _, x := range b.workers {
		i := slices.Index(x.batches, batch)
		if x.ID != w || i < 0 {
			continue
		}
		d := x.dispatches[i]
		x.alone = false
		x.batches, x.dispatches = slices.Delete(x.batches, i, i+1), slices.Delete(x.dispatches, i, i+1)
		for _, id := range d.Requests { // in order: which of them was late is learned one by one
			b.running = slices.DeleteFunc(b.running, func(r *refRequest) bool {
				if r.batch == batch && r.ID == id {
					b.end(r, max(started, finished))
				}
				return r.batch == batch && r.ID == id
			})
		}
		b.advisor.BatchDone(w, batch, started, max(started, finished))
	}
}

func (b *reference) Ended(id RequestID, at Time) {
	b.running = slices.DeleteFunc(b.running, func(r *refRequest) bool {
		if r.ID == id {
			b.end(r, at)
		}
		return r.ID == id
	})
}

func (b *reference) Queued() int { return len(b.waiting) }

func (b *reference) QueuedRows() int {
	rows := 0
	for _, r := range b.waiting {
		rows += r.Rows
	}
	return rows
}

func (b *reference) QueuedAt(level int) int {
	n := 0
	for _, r := range b.waiting {
		if r.Level == level && !r.client.owes {
			n++
		}
	}
	return n
}
