// SPDX-License-Identifier: Apache-2.0

package batcher

import "slices"

// peakPeriod is how many ended requests of a client one period of its peak covers. Counting
// requests instead of time lets the peak adapt at the client's pace.
const peakPeriod = 16

// client is the record of one client, at index ClientID of Batcher.clients.
type client struct {
	waiting    list // in commit order, linked by Batcher.byClient
	generation uint32
	joined     bool
	endings    uint8 // of the current period

	inFlight int32 // waiting and running requests
	running  int32
	owes     bool // it is in debt (accounts.go)
	Account
	peak, lastPeak int32 // most requests in flight in this period, and in the one before

	// With PreserveOrder: the prefix of waiting that is in the queues.
	// runEnd is its last request, or none; runRows its rows.
	runEnd  RequestID
	runRows int32
}

// couldJoin says whether the client may send more requests while the present ones are in flight
// (rule 3).
func (c *client) couldJoin() bool {
	return c.joined && !c.owes && c.inFlight < max(1, c.peak, c.lastPeak)
}

// client returns the record of id.
func (b *Batcher) client(id ClientID) *client {
	if int(id) >= len(b.clients) {
		old := len(b.clients)
		b.clients = grown(b.clients, int(id))
		for i := old; i < len(b.clients); i++ {
			b.clients[i].waiting = emptyList
			b.clients[i].runEnd = none
		}
	}
	return &b.clients[id]
}

// ClientJoined reports that c attached. From now on c could join a batch.
func (b *Batcher) ClientJoined(c ClientID) {
	if cl := b.client(c); !cl.joined {
		cl.joined = true
		b.joined++
		b.countJoinable(false, cl.couldJoin()) // after ClientSendsNoMore it may have requests in flight
	}
}

// ClientLeft reports that c is gone. It cancels the waiting requests of c and returns them, in commit
// order; the next call reuses the slice. Running requests of c still end by BatchDone or Ended.
func (b *Batcher) ClientLeft(c ClientID) []RequestID {
	b.cancelled = b.cancelled[:0]
	cl := b.client(c)
	if !cl.joined {
		return b.cancelled
	}
	b.countJoinable(cl.couldJoin(), false)
	cl.joined = false
	b.joined--
	for cl.waiting.head != none {
		id := cl.waiting.head
		b.cancelled = append(b.cancelled, id)
		b.withdraw(id)
		b.requests[id].state = unknown
	}
	if cl.owes {
		b.forgive(cl, slices.Index(b.debtors, c))
	}
	*cl = client{generation: cl.generation + 1, waiting: emptyList, runEnd: none}
	return b.cancelled
}

// ClientSendsNoMore reports that c will send no more requests. Its requests go on.
func (b *Batcher) ClientSendsNoMore(c ClientID) {
	cl := b.client(c)
	if cl.joined {
		b.countJoinable(cl.couldJoin(), false)
		cl.joined = false
		b.joined--
	}
}

// CancelWaiting cancels up to most of c's waiting requests and returns them, in commit order; the
// next call reuses the slice. The broker ends a client with very many requests in pieces.
func (b *Batcher) CancelWaiting(c ClientID, most int) []RequestID {
	b.cancelled = b.cancelled[:0]
	for cl := b.client(c); cl.waiting.head != none && len(b.cancelled) < most; {
		id := cl.waiting.head
		b.cancelled = append(b.cancelled, id)
		b.Cancel(id)
	}
	return b.cancelled
}

// clientStarts counts one more request in flight.
func (b *Batcher) clientStarts(c *client) {
	before := c.couldJoin()
	if !c.joined {
		c.joined = true
		b.joined++
	}
	c.inFlight++
	c.peak = max(c.peak, c.inFlight)
	b.countJoinable(before, c.couldJoin())
}

// clientEnds counts one less request in flight.
func (b *Batcher) clientEnds(c *client) {
	before := c.couldJoin()
	c.inFlight--
	c.endings++
	if c.endings == peakPeriod {
		c.endings = 0
		c.lastPeak, c.peak = c.peak, c.inFlight
	}
	b.countJoinable(before, c.couldJoin())
}

// countJoinable notes whether a client could join, before and now.
func (b *Batcher) countJoinable(before, after bool) {
	if !before && after {
		b.joinable++
	} else if before && !after {
		b.joinable--
	}
}

// linkClient puts id among its client's waiting requests: at the end, or for
// a requeued one where its first arrival puts it, which is near the front.
func (b *Batcher) linkClient(c *client, id RequestID) {
	first := b.requests[id].firstSeq
	after := c.waiting.tail
	if after != none && b.requests[after].firstSeq > first {
		after = none
		for x := c.waiting.head; b.requests[x].firstSeq < first; x = b.byClient[x].next {
			after = x
		}
	}
	b.byClient.insertAfter(&c.waiting, after, id)
}
