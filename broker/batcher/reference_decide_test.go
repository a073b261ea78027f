// SPDX-License-Identifier: Apache-2.0

package batcher

import (
	"cmp"
	"math"
	"slices"

	"github.com/ringbatch/ringbatch/policy"
)

// end ends a request, whose client was answered at a time; Never if that is not
// known.
func (b *reference) end(r *refRequest, at Time) {
	if b.clients[r.Client] == r.client {
		b.advisor.RequestEnded(r.ID, at)
	}
	r.client.end()
}

func (c *refClient) end() {
	c.inFlight--
	c.endings++
	if c.endings == 16 {
		c.lastPeak, c.peak, c.endings = c.peak, c.inFlight, 0
	}
}

// joined is how many clients are attached.
func (b *reference) joined() (n int) {
	for _, c := range b.clients {
		if c.joined {
			n++
		}
	}
	return n
}

func (c *refClient) couldJoin() bool {
	return c.joined && !c.owes && c.inFlight < max(1, c.peak, c.lastPeak)
}

func (b *reference) someoneCouldJoin() bool {
	for _, c := range b.clients {
		if c.couldJoin() {
			return true
		}
	}
	return false
}

// waitOf is how long r, which begins to wait, does so for others to batch with.
func (b *reference) waitOf(r *refRequest) Time {
	return b.advisor.WaitFor(r.Arrived, r.Deadline, b.queue())
}

// readyAt is when r stops waiting for others to batch with.
func (b *reference) readyAt(r *refRequest) Time {
	wait := r.wait
	budget := r.Deadline
	if b.settings.Level(r.Level).OnTimeout == policy.Reject {
		budget = min(budget, r.timeout)
	}
	if budget != Never {
		wait = min(wait, (budget-r.Arrived)/2)
	}
	return r.Arrived + wait
}

// rank is r's level now: its own, lifted by one for each Ageing waited.
func (b *reference) rank(r *refRequest, now Time) int {
	if b.settings.Ageing == 0 {
		return r.base
	}
	return max(0, r.base-int((now-r.since)/Time(b.settings.Ageing)))
}

func (b *reference) Decide(now Time) *Decisions {
	b.out = Decisions{Wake: Never}
	b.now = now
	for b.endOrDelayOne(now) {
	}
	b.forgive(now)
	for b.dispatchOne(now) {
	}
	for _, r := range b.waiting {
		b.out.Wake = min(b.out.Wake, r.Deadline, r.timeout)
	}
	switch held := b.heldUntil(now); {
	case b.chooseWorker(true) == nil || len(b.waiting) == 0:
	case held > now:
		b.out.Wake = min(b.out.Wake, held)
	default:
		for _, r := range b.waiting {
			if at := b.readyAt(r); at > now && r.Share == 0 {
				b.out.Wake = min(b.out.Wake, at)
			}
			if r.client.owes {
				b.out.Wake = min(b.out.Wake, r.client.paid)
				if turn := b.turnOf(r.client); turn > now {
					b.out.Wake = min(b.out.Wake, turn)
				}
			}
		}
	}
	return &b.out
}

// endOrDelayOne applies the earliest deadline or timeout that has passed.
func (b *reference) endOrDelayOne(now Time) bool {
	var first *refRequest
	at := func(r *refRequest) Time { return min(r.Deadline, r.timeout) }
	for _, r := range b.waiting {
		if at(r) <= now && (first == nil || cmp.Or(cmp.Compare(at(r), at(first)), cmp.Compare(r.tie, first.tie)) < 0) {
			first = r
		}
	}
	switch {
	case first == nil:
		return false
	case first.Deadline <= first.timeout:
		b.endWaiting(first.ID, at(first))
		b.out.Ended = append(b.out.Ended, End{first.ID, Expired})
	case b.settings.Level(first.Level).OnTimeout == policy.Reject:
		b.endWaiting(first.ID, at(first))
		b.out.Ended = append(b.out.Ended, End{first.ID, TimedOut})
	default:
		b.nextSeq++
		b.lastSince = max(b.lastSince, first.timeout)
		first.base, first.seq, first.tie, first.since, first.timeout = b.settings.LevelCount(), b.nextSeq, b.nextSeq, b.lastSince, Never
	}
	return true
}

// eligible is what may be dispatched: everything, or with PreserveOrder what
// would not overtake or run beside an earlier request of its client.
func (b *reference) eligible() []*refRequest {
	if !b.settings.PreserveOrder {
		return slices.DeleteFunc(slices.Clone(b.waiting), func(r *refRequest) bool { return r.client.owes })
	}
	last := map[*refClient]*refRequest{}
	held := map[*refClient]bool{}
	for _, r := range slices.Concat(b.running, b.waiting) {
		if r.batch != 0 || r.client.owes {
			held[r.client] = true
		}
	}
	var out []*refRequest
	for _, r := range b.waiting {
		prev := last[r.client]
		if prev != nil && (prev.Share > 0 || r.Share > 0 || prev.Dims != r.Dims || r.base < prev.base || r.seq < prev.seq) {
			held[r.client] = true
		}
		if !held[r.client] {
			out = append(out, r)
		}
		last[r.client] = r
	}
	return out
}

func (b *reference) dispatchOne(now Time) bool {
	idle, busy := b.chooseWorker(true), b.chooseWorker(false)
	queue := b.eligible()
	slices.SortFunc(queue, func(x, y *refRequest) int {
		return cmp.Or(cmp.Compare(b.rank(x, now), b.rank(y, now)), cmp.Compare(x.seq, y.seq))
	})
	retries := slices.DeleteFunc(slices.Clone(queue), func(r *refRequest) bool { return r.Share == 0 })
	slices.SortFunc(retries, func(x, y *refRequest) int { return cmp.Compare(x.seq, y.seq) })
	lacksRoom, avoided := false, map[WorkerID]bool{}
	for i, r := range retries {
		if avoided[r.Avoid] {
			continue // nothing overtakes the first that avoids this worker
		}
		avoided[r.Avoid] = true
		w, lacks := b.chooseForRetry(r)
		if w != nil {
			b.dispatch(w, b.packRetries(retries[i:]), Retry)
			return true
		}
		lacksRoom = lacksRoom || lacks
	}
	if lacksRoom {
		return false
	}
	if len(retries) > 0 {
		busy = nil // nothing overtakes them
	}
	// In queue order the first request of a ready shape is the head of the
	// shape that goes first.
	tried := map[Dims]bool{}
	for _, head := range queue {
		if head.Share > 0 || tried[head.Dims] {
			continue
		}
		tried[head.Dims] = true
		var shape []*refRequest
		for _, r := range queue {
			if r.Dims == head.Dims && r.Share == 0 {
				shape = append(shape, r)
			}
		}
		n, why, ok := b.ready(shape, now)
		to := b.chooseFor(idle != nil, shape[0])
		switch {
		case !ok:
			continue
		case idle != nil && why != Full && b.heldUntil(now) > now:
			b.heldFrom = min(b.heldFrom, now)
			return false
		case idle != nil:
			if why != Full {
				b.heldFrom = Never
			}
			if to == nil {
				return false
			}
			b.dispatch(to, shape[:n], why)
			return true
		case busy != nil && why == Full && to != nil:
			b.dispatch(to, shape[:n], why)
			return true
		}
		return false // nothing overtakes the first batch, which waits for an idle worker
	}
	if idle != nil {
		b.heldFrom = Never
		return b.dispatchDebtor(now)
	}
	return false
}

// forgive ends the debts that are paid. Who paid first in the list of debtors goes behind.
func (b *reference) forgive(now Time) {
	for i := len(b.debtors) - 1; i >= 0; i-- {
		c := b.debtors[i]
		if c.paid > now {
			continue
		}
		b.debtors = slices.Delete(b.debtors, i, i+1)
		c.owes = false
		for _, r := range b.waiting {
			if r.client == c && !b.settings.PreserveOrder {
				b.nextSeq++
				r.seq, r.since = b.nextSeq, b.lastSince
			}
		}
	}
}

func (b *reference) turnOf(c *refClient) Time {
	turn := b.lastGood + c.cost
	runs := slices.ContainsFunc(b.running, func(r *refRequest) bool { return r.client == c })
	if runs && b.settings.PreserveOrder {
		return Never
	}
	if !runs {
		turn = min(turn, c.paid-b.credit)
	}
	return turn
}

// dispatchDebtor gives a client in debt its turn: the one whose debt ends first.
func (b *reference) dispatchDebtor(now Time) bool {
	var batch []*refRequest
	var w *refWorker
	for _, c := range b.debtors {
		var own []*refRequest
		for _, r := range b.waiting {
			if r.client == c {
				own = append(own, r)
			}
		}
		if len(own) == 0 || b.turnOf(c) > now || batch != nil && c.paid >= batch[0].client.paid {
			continue
		}
		if x, _ := b.chooseForRetry(own[0]); x != nil {
			batch, w = own, x
		}
	}
	switch {
	case batch == nil:
		return false
	case batch[0].Share > 0:
		b.dispatch(w, b.packRetries(batch), Retry)
	default:
		b.dispatch(w, b.packRetries(batch), Alone)
	}
	return true
}

// heldUntil is when batches that are not full may run beside others.
func (b *reference) heldUntil(now Time) (until Time) {
	for _, r := range b.waiting {
		if r.Deadline != Never {
			return now
		}
	}
	return max(now, b.advisor.HoldUntil(min(b.heldFrom, now)))
}

// ready says how many requests of a shape's queue would go to an idle worker.
func (b *reference) ready(queue []*refRequest, now Time) (n int, why Reason, ok bool) {
	rows, cost, preferred, due := 0, 0, 0, false
	for i, r := range queue {
		if rows+r.Rows > b.settings.MaxBatchSize || i > 0 && cost+r.Rows*r.Cost > b.maxCost() {
			return i, Full, true
		}
		rows += r.Rows
		cost += r.Rows * r.Cost
		if slices.Contains(b.settings.PreferredBatchSizes, rows) {
			preferred = i + 1
		}
		due = due || now >= b.readyAt(r)
		if rows == b.settings.MaxBatchSize || cost >= b.maxCost() {
			return i + 1, Full, true
		}
	}
	switch {
	case preferred > 0:
		return preferred, Preferred, true
	case due:
		return len(queue), Deadline, true
	case !b.someoneCouldJoin():
		return len(queue), Nobody, true
	}
	return 0, 0, false
}

func (b *reference) maxCost() int {
	if b.settings.MaxBatchCost == 0 {
		return math.MaxInt
	}
	return b.settings.MaxBatchCost
}

// chooseWorker picks the idle, or else the busy but not full, worker that has
// had the least rows for its share.
func (b *reference) chooseWorker(idle bool) *refWorker { return b.chooseFor(idle, nil) }

// chooseFor is chooseWorker with room for a request.
func (b *reference) chooseFor(idle bool, r *refRequest) *refWorker {
	var best *refWorker
	for _, w := range b.workers {
		if r != nil && !b.hasRoom(w, r) {
			continue
		}
		if !w.Paused && !w.alone && len(w.batches) < w.Depth && (len(w.batches) < w.Lanes) == idle {
			if best == nil || cmp.Or(cmp.Compare(w.pass, best.pass), cmp.Compare(w.ID, best.ID)) < 0 {
				best = w
			}
		}
	}
	return best
}

// hasRoom says whether a worker may have a request beside what it holds.
func (b *reference) hasRoom(w *refWorker, r *refRequest) bool {
	cost := r.Rows * r.Cost
	for _, d := range w.dispatches {
		cost += d.Cost
	}
	return len(w.batches) == 0 || !(w.Lanes > 1 && r.Share == 1 && r.Avoid == NoWorker) && (b.settings.MaxBatchSize > 1 || cost <= b.maxCost())
}

// chooseForRetry is chooseWorker for a retry, which may avoid a worker. lacksRoom: one that is idle holds too much.
func (b *reference) chooseForRetry(r *refRequest) (best *refWorker, lacksRoom bool) {
	avoid := r.Avoid
	if r.Share == 0 {
		avoid = NoWorker
	}
	serving := slices.DeleteFunc(slices.Clone(b.workers), func(w *refWorker) bool { return w.Paused })
	isAvoided := func(w *refWorker) bool { return w.ID == avoid }
	if others := slices.DeleteFunc(slices.Clone(serving), isAvoided); len(others) > 0 {
		serving = others
	}
	if trusted := slices.DeleteFunc(slices.Clone(serving), func(w *refWorker) bool { return w.Doubted || isAvoided(w) }); len(trusted) > 0 {
		serving = trusted
	}
	for _, w := range serving {
		if w.alone || len(w.batches) >= w.Lanes {
			continue
		}
		if !b.hasRoom(w, r) {
			lacksRoom = true
		} else if best == nil || cmp.Or(cmp.Compare(w.pass, best.pass), cmp.Compare(w.ID, best.ID)) < 0 {
			best = w
		}
	}
	return best, lacksRoom
}

// packRetries is the batch that the first of some retries, or of a client's requests, goes out with.
func (b *reference) packRetries(retries []*refRequest) (batch []*refRequest) {
	first := retries[0]
	rows, cost, share := 0, 0, math.MaxInt
	for _, r := range retries {
		if r.Avoid != first.Avoid && !r.client.owes {
			continue
		}
		if r.Share > 0 {
			share = min(share, r.Share)
		}
		if len(batch) > 0 && (r.Dims != first.Dims || (r.Share > 0) != (first.Share > 0) || r.Avoid != first.Avoid || len(batch) >= share || rows+r.Rows > b.settings.MaxBatchSize ||
			cost+r.Rows*r.Cost > b.maxCost()) {
			break
		}
		rows += r.Rows
		cost += r.Rows * r.Cost
		batch = append(batch, r)
	}
	return batch
}

func (b *reference) dispatch(w *refWorker, requests []*refRequest, why Reason) {
	b.lastBatch++
	d := Dispatch{Worker: w.ID, Batch: b.lastBatch, Dims: requests[0].Dims, Why: why}
	for _, r := range requests {
		d.Requests = append(d.Requests, r.ID)
		d.Rows += r.Rows
		d.Cost += r.Rows * r.Cost
		r.batch = d.Batch
		b.waiting = slices.DeleteFunc(b.waiting, func(x *refRequest) bool { return x == r })
		b.running = append(b.running, r)
	}
	d.PadTo = padTo(&b.settings, &w.Worker, d.Rows)
	w.batches, w.dispatches = append(w.batches, d.Batch), append(w.dispatches, d)
	w.alone = w.Lanes > 1 && requests[0].Share == 1 && requests[0].Avoid == NoWorker
	w.pass += int64(d.Rows) << 16 / int64(w.Share)
	b.out.Dispatches = append(b.out.Dispatches, d)
	b.advisor.BatchSent(b.now, d)
}
