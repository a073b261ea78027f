// SPDX-License-Identifier: Apache-2.0

package batcher

import "github.com/ringbatch/ringbatch/policy"

// Arrive queues a request. If it returns an error, one of the Err values of this package, then nothing
// has changed. Requests of a level are served in the order of their Arrive calls. Arrived comes
// from the client, so it only moves times. A client that sends a request counts as joined.
func (b *Batcher) Arrive(now Time, r Request) error {
	if r.Level == DefaultLevel {
		r.Level = b.settings.DefaultPriority
	}
	if r.Level < 0 || r.Level >= b.settings.LevelCount() {
		return ErrNoLevel
	}
	if r.Rows > b.settings.MaxBatchSize {
		return ErrTooLarge
	}
	if r.Rows < 1 {
		return ErrNoRows
	}
	if b.stateOf(r.ID) != unknown {
		return ErrInUse
	}
	if len(b.settings.Buckets) > 0 {
		var err error
		if r.Dims, err = bucket(&b.settings, r.Dims); err != nil {
			return err
		}
	}
	r.Cost = costOfRow(&b.settings, &r)
	r.Arrived = min(r.Arrived, now)
	r.Deadline = DeadlineOf(&b.settings, r.Level, r.Arrived, r.Deadline)
	timeout := Never
	if len(b.settings.Levels) > 0 {
		policy := &b.settings.Levels[r.Level]
		if policy.DefaultTimeout > 0 {
			timeout = r.Arrived + Time(policy.DefaultTimeout)
		}
		if policy.MaxQueue > 0 && b.queuedAt[r.Level] >= policy.MaxQueue && r.Deadline > now {
			return ErrQueueFull
		}
	}
	if r.Deadline <= now {
		return ErrExpired
	}
	if b.advisor.IsLate(now, r, b.queueBefore(r.Level)) {
		return ErrLate
	}

	c := b.client(r.Client)
	b.clientStarts(c)
	b.lastSeq++
	b.lastSince = max(b.lastSince, r.Arrived)
	x := b.record(r.ID)
	x.describe(&r, c.generation)
	x.timeout = timeout
	x.place(b.lastSeq, b.lastSince)
	b.admit(now, r.ID, &r.Dims)
	b.advisor.RequestQueued(now, r)
	return nil
}

// queue is the queue without the requests of clients in debt, which go after the others.
func (b *Batcher) queue() Queue {
	return Queue{b.queued - b.owed.Requests, b.queuedRows - b.owed.Rows, b.queuedCost - b.owed.Cost, b.joined}
}

// queueBefore is the queue before a request of a level that arrives now. Less urgent levels do not
// count, nor do levels whose requests may be delayed behind it. Rows and cost are estimated by
// the average of the whole queue.
func (b *Batcher) queueBefore(level int) Queue {
	if b.queued == b.owed.Requests || len(b.settings.Levels) < 2 {
		return b.queue()
	}
	n := 0
	for i := 0; i <= level; i++ {
		if b.settings.Levels[i].OnTimeout == policy.Reject {
			n += b.queuedAt[i]
		}
	}
	q := b.queue()
	q.Requests, q.Rows, q.Cost = n, q.Rows*n/q.Requests, q.Cost*n/q.Requests
	return q
}

// Requeue puts a running request, whose worker died or failed its batch, back to the front of its
// level: to the place of its first arrival. Queue limits and its level's queue timeout do not
// apply, and r may make it a retry (Share). If its client has left, Requeue is Ended.
func (b *Batcher) Requeue(now Time, r Request) {
	if b.stateOf(r.ID) == waiting {
		return
	}
	if len(b.settings.Buckets) > 0 {
		if dims, err := bucket(&b.settings, r.Dims); err == nil {
			r.Dims = dims
		}
	}
	c := b.client(r.Client)
	x := b.record(r.ID)
	if x.state == unknown {
		b.requeueUnknown(now, r, x, c)
		return
	}
	if x.client != r.Client || x.clientGen != c.generation {
		b.endRunning(r.ID, Never)
		return
	}
	b.stopRunning(x, c, r.ID)
	x.deadline = min(r.Deadline, x.deadline)
	x.timeout = Never
	x.seq, x.since, x.base = x.firstSeq, x.firstSince, x.level
	x.retryAs(&r)
	b.admit(now, r.ID, &r.Dims)
}

// requeueUnknown is Requeue for a request that the batcher does not know, for example after
// its Ended. The request becomes the first of its level.
func (b *Batcher) requeueUnknown(now Time, r Request, x *request, c *client) {
	if r.Level < 0 || r.Level >= b.settings.LevelCount() {
		r.Level = b.settings.DefaultPriority
	}
	r.Rows = max(1, r.Rows)
	r.Cost = costOfRow(&b.settings, &r)
	if r.Rows > b.settings.MaxBatchSize {
		r.Share = 1
	}
	r.Arrived = min(r.Arrived, now)
	b.clientStarts(c)
	b.frontSeq--
	x.describe(&r, c.generation)
	x.timeout = Never
	x.place(b.frontSeq, r.Arrived)
	b.admit(now, r.ID, &r.Dims)
}

// Cancel withdraws a waiting request. False: it is running or unknown, and nothing has changed.
func (b *Batcher) Cancel(id RequestID) bool {
	if b.stateOf(id) != waiting {
		return false
	}
	b.endWaiting(id, Never)
	return true
}

// Ended reports that a running request ended before its BatchDone; at is as in Advisor.RequestEnded.
// The caller may call it any number of times, and use the id again at once. The worker's place is
// free only with BatchDone.
func (b *Batcher) Ended(id RequestID, at Time) {
	if b.stateOf(id) == running {
		b.endRunning(id, at)
	}
}

// endWaiting ends a waiting request. at is as in Advisor.RequestEnded.
func (b *Batcher) endWaiting(id RequestID, at Time) {
	r := &b.requests[id]
	c := &b.clients[r.client]
	b.withdraw(id)
	r.state = unknown
	b.clientEnds(c)
	b.advisor.RequestEnded(id, at)
	b.release(c)
}

// endRunning ends a running request. at is as in Advisor.RequestEnded.
func (b *Batcher) endRunning(id RequestID, at Time) {
	r := &b.requests[id]
	c := &b.clients[r.client]
	ours := r.clientGen == c.generation
	b.stopRunning(r, c, id)
	r.state = unknown
	if ours {
		b.advisor.RequestEnded(id, at)
		b.clientEnds(c)
		b.release(c)
	}
}

// stopRunning takes id out of its batch.
func (b *Batcher) stopRunning(r *request, c *client, id RequestID) {
	if r.batch >= 0 {
		b.inQueue.unlink(&b.batches[r.batch].requests, id)
	}
	if r.clientGen == c.generation {
		c.running--
	}
}

func (b *Batcher) stateOf(id RequestID) state {
	if int(id) >= len(b.requests) {
		return unknown
	}
	return b.requests[id].state
}

// record is the record of id, made if needed.
func (b *Batcher) record(id RequestID) *request {
	if int(id) >= len(b.requests) {
		b.requests = grown(b.requests, int(id))
		b.inQueue = grown(b.inQueue, len(b.requests)-1)
		b.byClient = grown(b.byClient, len(b.requests)-1)
	}
	return &b.requests[id]
}
