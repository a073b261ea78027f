// SPDX-License-Identifier: Apache-2.0

package batcher

import "github.com/ringbatch/ringbatch/policy"

// Decide finds everything that can be done at now, in five stages:
//
//  1. end or delay the requests whose deadline or timeout has passed
//  2. note the requests whose ready time has passed
//  3. idle workers: first retries, then batches that are ready, then clients in debt
//  4. busy workers with room: full batches only, and only in their turn
//  5. say when to look again
//
// now must not be less than in earlier calls. The result is valid until the
// next Decide.
func (b *Batcher) Decide(now Time) *Decisions {
	b.out.Dispatches = b.out.Dispatches[:0]
	b.out.Ended = b.out.Ended[:0]
	b.ids = b.ids[:0]

	b.passDeadlines(now)
	b.passReadyTimes(now)
	b.forgiveDebts(now)
	for !b.idle.empty() && b.feedIdle(now) {
	}
	for !b.roomy.empty() && b.idle.empty() && b.feedBusy(now) {
	}

	// The ids moved while their array grew; only now do they stay.
	for i, at := 0, 0; i < len(b.out.Dispatches); i++ {
		d := &b.out.Dispatches[i]
		n := len(d.Requests)
		d.Requests = b.ids[at : at+n : at+n]
		at += n
	}
	b.out.Wake = b.wake(now)
	return &b.out
}

// Learn gives the advisor time to compute, up to some 10 µs. The caller calls it after it carried out
// the decisions; without it the advisor learns nothing. now is as in Decide.
func (b *Batcher) Learn(now Time) { b.advisor.Learn(now) }

// passDeadlines is stage 1.
func (b *Batcher) passDeadlines(now Time) {
	for {
		first, at := b.changes.first()
		if at > now {
			return
		}
		id := RequestID(first)
		r := &b.requests[id]
		switch {
		case r.deadline <= r.timeout:
			b.endWaiting(id, at)
			b.out.Ended = append(b.out.Ended, End{id, Expired})
		case b.settings.Level(int(r.level)).OnTimeout == policy.Reject:
			b.endWaiting(id, at)
			b.out.Ended = append(b.out.Ended, End{id, TimedOut})
		default:
			b.delay(id)
		}
	}
}

// delay moves a request that timed out to the end of the list behind all levels, as if it
// arrived there at its timeout.
func (b *Batcher) delay(id RequestID) {
	r := &b.requests[id]
	b.changes.remove(uint32(id))
	c := &b.clients[r.client]
	switch {
	case b.settings.PreserveOrder:
		b.hold(c)
		b.unlinkOrder(id)
	case !r.held:
		b.leave(id)
	}
	b.lastSeq++
	b.lastSince = max(b.lastSince, r.timeout)
	r.seq, r.since = b.lastSeq, b.lastSince
	r.base = uint8(b.ranks - 1)
	r.timeout = Never
	if r.deadline != Never {
		b.changes.add(uint32(id), r.deadline, r.seq)
	}
	switch {
	case b.settings.PreserveOrder:
		b.linkOrder(id)
		b.release(c)
	case !r.held:
		b.enter(id)
	}
}

// passReadyTimes is stage 2.
func (b *Batcher) passReadyTimes(now Time) {
	for {
		first, at := b.readies.first()
		if at > now {
			return
		}
		b.readies.remove(first)
		r := &b.requests[first]
		r.due = true
		if !r.held {
			b.shapes.shapes[r.shape].due++
			b.refile(r.shape, 0)
		}
	}
}

// feedIdle is one step of stage 3. False: no batch is ready, or the advisor holds it back.
func (b *Batcher) feedIdle(now Time) bool {
	s := b.firstReady(now)
	id, w, lacksRoom := b.nextRetry()
	switch {
	case id != none:
		b.dispatchFrom(b.inQueue, w, id, now)
		return true
	case lacksRoom:
		return false // nothing overtakes it
	}
	if s < 0 {
		b.heldFrom = Never
		return b.feedDebtor(now)
	}
	sh := &b.shapes.shapes[s]
	if !sh.full {
		if b.heldUntil(now) > now {
			b.heldFrom = min(b.heldFrom, now)
			return false // and nothing overtakes it
		}
		b.heldFrom = Never
	}
	if w = b.workerFor(&b.idle, b.head(s, now)); w == NoWorker {
		return false
	}
	limit, why := b.settings.MaxBatchSize, Nobody
	switch {
	case sh.full:
		why = Full
	case sh.preferred > 0:
		limit, why = int(sh.preferred), Preferred
	case sh.due > 0:
		why = Deadline
	}
	b.dispatch(w, s, limit, why, now)
	return true
}

// heldUntil is the time until which batches that are not full are held back; now if they are not.
// Nothing is held back while a request with a deadline waits.
func (b *Batcher) heldUntil(now Time) Time {
	if b.dated > 0 {
		return now
	}
	return max(now, b.advisor.HoldUntil(min(now, b.heldFrom)))
}

// feedBusy is one step of stage 4. False: no batch is full, or a batch that is not full goes
// before it. If full batches could overtake, a heavy load of them would keep all workers
// busy, and starve a retry or a rare shape.
func (b *Batcher) feedBusy(now Time) bool {
	if b.full.occupied == 0 || b.retrying > 0 {
		return false
	}
	s := b.firstReady(now)
	if !b.shapes.shapes[s].full {
		return false
	}
	w := b.workerFor(&b.roomy, b.head(s, now))
	if w == NoWorker {
		return false
	}
	b.dispatch(w, s, b.settings.MaxBatchSize, Full, now)
	return true
}

// head is the first request of the queue of shape s.
func (b *Batcher) head(s int32, now Time) *request {
	return &b.requests[b.list(s, b.firstLevel(s, now)).head]
}

// firstReady is the shape that the next idle worker gets, or -1.
func (b *Batcher) firstReady(now Time) int32 {
	if len(b.settings.PreferredBatchSizes) > 0 {
		b.refreshPreferred(now)
	}
	if b.joinable == 0 {
		return b.first(&b.anything, now)
	}
	return b.first(&b.ready, now)
}

// wake is stage 5. Ready times and preferred sizes matter only to an idle worker; a worker that
// becomes idle is an event. A batch that is held back waits until a running batch is done or overdue.
func (b *Batcher) wake(now Time) Time {
	_, at := b.changes.first()
	if b.idle.empty() || b.queued == 0 {
		return at
	}
	if held := b.heldUntil(now); held > now {
		return min(at, held)
	}
	_, ready := b.readies.first()
	_, reorder := b.reorders.first()
	return min(at, ready, reorder, b.nextDebt(now))
}
