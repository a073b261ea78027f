// SPDX-License-Identifier: Apache-2.0

package batcher

import "github.com/ringbatch/ringbatch/policy"

// The books of a waiting request have two layers:
//
//	admit / withdraw   it waits / no longer waits: counts, client, timers
//	enter / leave      it is / is not in a queue from which batches are packed
//
// Without PreserveOrder every waiting request is in a queue. With it, order.go
// holds some of them back.

// admit makes id, whose record is filled in, a waiting request.
func (b *Batcher) admit(now Time, id RequestID, dims *Dims) {
	r := &b.requests[id]
	r.state = waiting
	r.shape = b.shapes.find(dims)
	b.shapes.shapes[r.shape].requests++
	b.lists = b.listsFor(len(b.shapes.shapes))
	b.queued++
	b.queuedRows += int(r.rows)
	b.queuedCost += int(r.cost)
	b.queuedAt[r.level]++
	if r.deadline != Never {
		b.dated++
	}
	c := &b.clients[r.client]
	r.held, r.owed = b.settings.PreserveOrder || c.owes, false
	if c.owes {
		b.countOwed(r, 1)
	} else {
		b.lastGood = max(b.lastGood, now)
	}
	b.linkClient(c, id)
	b.setReadyTimer(now, id)
	if at := min(r.deadline, r.timeout); at != Never {
		b.changes.add(uint32(id), at, r.seq)
	}
	switch {
	case b.settings.PreserveOrder:
		b.linkOrder(id)
		b.release(c)
	case !c.owes:
		b.enter(id)
	}
}

// withdraw undoes admit. The caller sets the request's next state.
func (b *Batcher) withdraw(id RequestID) {
	s := b.requests[id].shape
	b.refile(s, b.withdrawUnfiled(id))
}

// withdrawUnfiled is withdraw without refile. The caller calls refile with the result before it
// admits another request.
func (b *Batcher) withdrawUnfiled(id RequestID) (heads uint64) {
	r := &b.requests[id]
	c := &b.clients[r.client]
	if b.settings.PreserveOrder {
		b.unlinkOrder(id)
		if !r.held {
			b.shortenRun(c, id)
		}
	}
	if !r.held {
		heads = b.leaveUnfiled(id)
	}
	b.byClient.unlink(&c.waiting, id)
	if !r.due {
		b.readies.remove(uint32(id))
	}
	b.changes.remove(uint32(id))
	b.queued--
	b.queuedRows -= int(r.rows)
	b.queuedCost -= int(r.cost)
	b.queuedAt[r.level]--
	if r.owed {
		b.countOwed(r, -1)
	}
	if r.deadline != Never {
		b.dated--
	}
	sh := &b.shapes.shapes[r.shape]
	sh.requests--
	if sh.requests == 0 {
		b.shapes.recycle(r.shape)
	}
	return heads
}

// setReadyTimer computes the ready time of a request (rule 2).
func (b *Batcher) setReadyTimer(now Time, id RequestID) {
	r := &b.requests[id]
	wait := b.advisor.WaitFor(r.arrived, r.deadline, b.queue())
	budget := r.deadline
	if r.timeout < budget && b.settings.Level(int(r.level)).OnTimeout == policy.Reject {
		budget = r.timeout
	}
	if budget != Never {
		wait = min(wait, (budget-r.arrived)/2)
	}
	ready := r.arrived + wait
	r.due = r.isRetry() || ready <= now
	if !r.due {
		b.readies.add(uint32(id), ready, r.seq)
	}
}

// enter puts id into its queue, at the place that its seq gives it.
func (b *Batcher) enter(id RequestID) {
	r := &b.requests[id]
	if r.isRetry() {
		b.insertBySeq(b.inQueue, b.retryList(r), id)
		b.retrying++
		return
	}
	after := b.insertBySeq(b.inQueue, b.list(r.shape, r.base), id)
	b.entered(r, after == none)
}

// entered counts r, which was put into its list, asHead or further behind.
func (b *Batcher) entered(r *request, asHead bool) {
	sh := &b.shapes.shapes[r.shape]
	sh.levels |= 1 << r.base
	sh.count(r, 1)
	b.markStale(r.shape)
	heads := uint64(0)
	if asHead {
		heads = 1 << r.base
	}
	b.refile(r.shape, heads)
}

// leave takes id out of its queue.
func (b *Batcher) leave(id RequestID) {
	b.refile(b.requests[id].shape, b.leaveUnfiled(id))
}

func (b *Batcher) leaveUnfiled(id RequestID) (heads uint64) {
	r := &b.requests[id]
	if r.isRetry() {
		b.inQueue.unlink(b.retryList(r), id)
		b.retrying--
		return 0
	}
	l := b.list(r.shape, r.base)
	if l.head == id {
		heads = 1 << r.base
	}
	b.inQueue.unlink(l, id)
	sh := &b.shapes.shapes[r.shape]
	if l.head == none {
		sh.levels &^= 1 << r.base
	}
	sh.count(r, -1)
	b.markStale(r.shape)
	return heads
}

// count adds r to the shape's counts n times.
func (sh *shape) count(r *request, n int32) {
	sh.rows += n * r.rows
	sh.cost += int(n) * int(r.cost)
	if r.due {
		sh.due += n
	}
	if r.rows > 1 {
		sh.large += n
	}
}

// list is the queue of shape s at base level level.
func (b *Batcher) list(s int32, level uint8) *list {
	return &b.lists[int(s)*b.ranks+int(level)]
}

// listsFor returns the lists of n shapes.
func (b *Batcher) listsFor(n int) []list {
	old := len(b.lists)
	if old >= n*b.ranks {
		return b.lists
	}
	lists := grown(b.lists, n*b.ranks-1)
	for i := old; i < len(lists); i++ {
		lists[i] = emptyList
	}
	return lists
}
