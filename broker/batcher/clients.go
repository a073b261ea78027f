// SPDX-License-Identifier: Apache-2.0

package batcher

// peakPeriod is how many ended requests of a client one period of its peak
// covers. Counting requests instead of time lets the peak adapt without a
// clock, at the client's own pace.
const peakPeriod = 16

// client is the record of one client, at index ClientID of Batcher.clients.
type client struct {
	waiting    list // in commit order, linked by Batcher.byClient
	generation uint32
	joined     bool
	endings    uint8 // of the current period

	inFlight       int32 // waiting and running requests
	running        int32
	peak, lastPeak int32 // most requests in flight in this period, and in the one before

	// With PreserveOrder: the prefix of waiting that is in the queues.
	// runEnd is its last request, or none; runRows its rows.
	runEnd  RequestID
	runRows int32
}

// couldSend is how many more requests may be expected while the present ones are
// still in flight: the client keeps fewer in flight than it recently did. A client
// that waits for each answer has a peak of one, so it never makes its own request
// wait; one that is attached and idle could always join.
func (c *client) couldSend() int {
	if !c.joined {
		return 0
	}
	return max(0, int(max(1, c.peak, c.lastPeak)-c.inFlight))
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

// ClientJoined tells that c attached. From now on c could join a batch.
func (b *Batcher) ClientJoined(c ClientID) {
	if cl := b.client(c); !cl.joined {
		cl.joined = true
		b.joined++
		b.countJoinable(0, cl.couldSend()) // one that left may have requests in flight still
	}
}

// ClientLeft tells that c is gone. Its waiting requests are cancelled and
// returned, in commit order; the slice is reused by the next call. Its running
// requests still end by BatchDone or Ended, and count for nobody.
func (b *Batcher) ClientLeft(c ClientID) []RequestID {
	b.cancelled = b.cancelled[:0]
	cl := b.client(c)
	if !cl.joined {
		return b.cancelled
	}
	b.countJoinable(cl.couldSend(), 0)
	cl.joined = false
	b.joined--
	for cl.waiting.head != none {
		id := cl.waiting.head
		b.cancelled = append(b.cancelled, id)
		b.withdraw(id)
		b.requests[id].state = unknown
	}
	*cl = client{generation: cl.generation + 1, waiting: emptyList, runEnd: none}
	return b.cancelled
}

// ClientSendsNoMore tells that c sends nothing more. Its requests go on.
func (b *Batcher) ClientSendsNoMore(c ClientID) {
	cl := b.client(c)
	if cl.joined {
		b.countJoinable(cl.couldSend(), 0)
		cl.joined = false
		b.joined--
	}
}

// CancelWaiting cancels up to most of c's waiting requests and returns them, in
// commit order; the slice is reused by the next call. A client that leaves with
// very many is parted with in pieces.
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
	before := c.couldSend()
	if !c.joined {
		c.joined = true
		b.joined++
	}
	c.inFlight++
	c.peak = max(c.peak, c.inFlight)
	b.countJoinable(before, c.couldSend())
}

// clientEnds counts one less request in flight.
func (b *Batcher) clientEnds(c *client) {
	before := c.couldSend()
	c.inFlight--
	c.endings++
	if c.endings == peakPeriod {
		c.endings = 0
		c.lastPeak, c.peak = c.peak, c.inFlight
	}
	b.countJoinable(before, c.couldSend())
}

// countJoinable notes how many requests of a client could join, before and now.
func (b *Batcher) countJoinable(before, after int) {
	b.expected += after - before
	if before == 0 && after > 0 {
		b.joinable++
	} else if before > 0 && after == 0 {
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
