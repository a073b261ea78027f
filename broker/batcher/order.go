// SPDX-License-Identifier: Apache-2.0

package batcher

// PreserveOrder. A client with nothing running has its run in the queues: the
// longest prefix of its waiting requests, in commit order, that one batch could
// take in that order. That is: all of one shape, none more urgent than the one
// before it, and a retry only by itself. Everything behind the run is
// held, and while anything of the client is running all of it is held.
//
// A run needs no more rows than a batch, which bounds what must be taken back
// when the client's turn is over.
//
// A held request keeps its place: Batcher.orders has every waiting request of a shape
// and level in order, held or not, so that a released one finds its neighbours
// in the queue.

// release extends the run of c as far as it goes.
func (b *Batcher) release(c *client) {
	if c.running > 0 || c.owes || !b.settings.PreserveOrder {
		return
	}
	for {
		next := c.waiting.head
		if c.runEnd != none {
			next = b.byClient[c.runEnd].next
		}
		if next == none || (c.runEnd != none && !b.mayFollow(c, next)) {
			return
		}
		r := &b.requests[next]
		r.held = false
		c.runEnd = next
		c.runRows += r.rows
		b.enterInOrder(next)
	}
}

// mayFollow says whether next belongs to the run that ends just before it.
func (b *Batcher) mayFollow(c *client, next RequestID) bool {
	last, r := &b.requests[c.runEnd], &b.requests[next]
	return int(c.runRows) < b.settings.MaxBatchSize &&
		!last.isRetry() && !r.isRetry() &&
		last.shape == r.shape && last.base <= r.base && last.seq < r.seq
}

// hold takes the whole run of c back.
func (b *Batcher) hold(c *client) {
	for c.runEnd != none {
		id := c.runEnd
		b.shortenRun(c, id)
		b.leave(id)
		b.requests[id].held = true
	}
}

// shortenRun notes that id, which is in the run of c, leaves it.
func (b *Batcher) shortenRun(c *client, id RequestID) {
	r := &b.requests[id]
	c.runRows -= r.rows
	if c.runEnd == id {
		c.runEnd = b.byClient[id].prev
	}
}

// enterInOrder is enter for a request that was held. It finds its place by the nearest neighbour
// that is in the queue.
func (b *Batcher) enterInOrder(id RequestID) {
	r := &b.requests[id]
	if r.isRetry() {
		b.enter(id)
		return
	}
	l := b.list(r.shape, r.base)
	place := l.tail
	before, next := b.inOrder[id].prev, b.inOrder[id].next
	for {
		if before == none || !b.requests[before].held {
			place = before
			break
		}
		if next == none {
			break
		}
		if !b.requests[next].held {
			place = b.inQueue[next].prev
			break
		}
		before, next = b.inOrder[before].prev, b.inOrder[next].next
	}
	b.inQueue.insertAfter(l, place, id)
	b.entered(r, place == none)
}

// linkOrder gives id its place among all waiting requests of its shape and
// level.
func (b *Batcher) linkOrder(id RequestID) {
	if r := &b.requests[id]; !r.isRetry() {
		b.inOrder = grown(b.inOrder, len(b.requests)-1)
		b.insertBySeq(b.inOrder, b.order(r), id)
	}
}

func (b *Batcher) unlinkOrder(id RequestID) {
	if r := &b.requests[id]; !r.isRetry() {
		b.inOrder.unlink(b.order(r), id)
	}
}

// order is the list of all waiting requests of r's shape and level.
func (b *Batcher) order(r *request) *list {
	i := int(r.shape)*b.ranks + int(r.base)
	for len(b.orders) <= i {
		b.orders = append(b.orders, emptyList)
	}
	return &b.orders[i]
}
