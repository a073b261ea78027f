// SPDX-License-Identifier: Apache-2.0

package batcher

import (
	"math"

	"github.com/ringbatch/ringbatch/policy"
)

// none ends an intrusive list; it is no request's id.
const none RequestID = math.MaxUint32

// The states of a request:
//
//	         Arrive               Decide               BatchDone, Ended
//	unknown ────────► waiting ──────────────► running ──────────────────► unknown
//	                   │  ▲                       │
//	                   │  └────── Requeue ────────┘
//	                   └─► unknown: Cancel, ClientLeft, expired, timed out
type state uint8

const (
	unknown state = iota
	waiting
	running
)

// request is the record of one request, at index RequestID of
// Batcher.requests.
type request struct {
	// seq orders the queue of a level by Arrive calls. A delayed request gets a new seq, a
	// requeued one its first seq again. Ageing counts from since. Neither decreases along a
	// list, so ageing has lifted the head of a list furthest.
	seq, firstSeq     int64
	since, firstSince Time

	arrived  Time
	deadline Time
	timeout  Time // of its level's queue policy; Never once it has struck, or after a Requeue

	rows      int32
	cost      int32 // of all rows, at most policy.MaxCost
	shape     int32
	batch     int32 // running: index in Batcher.batches; -1 if its worker is gone
	client    ClientID
	clientGen uint32   // differs from the client's once that client has left
	avoid     WorkerID // of a retry; else NoWorker

	share uint16 // of a retry: the most requests of its batch; 0: it is none
	state state
	level uint8 // as asked for
	base  uint8 // the list it waits in: its level, or the last one once delayed
	due   bool  // its ready time has passed
	held  bool  // waiting: held back by PreserveOrder, or for its client's debt
	owed  bool  // waiting: its client is in debt
}

// ranWithDead says whether the request was in a worker that died, so that it goes out by itself.
func (x *request) ranWithDead() bool { return x.share == 1 && x.avoid == NoWorker }

// describe fills in the caller's description of the request.
func (x *request) describe(r *Request, clientGen uint32) {
	x.arrived = r.Arrived
	x.deadline = r.Deadline
	x.rows = int32(r.Rows)
	x.cost = int32(min(r.Rows*r.Cost, policy.MaxCost))
	x.client = r.Client
	x.clientGen = clientGen
	x.level = uint8(r.Level)
	x.base = uint8(r.Level)
	x.retryAs(r)
	x.held = false
}

// retryAs makes the request a retry, if r says so.
func (x *request) retryAs(r *Request) {
	x.share, x.avoid = uint16(min(r.Share, math.MaxUint16)), r.Avoid
	if x.share == 0 {
		x.avoid = NoWorker
	}
}

// isRetry says that the request waits among the retries.
func (x *request) isRetry() bool { return x.share > 0 }

// place gives the request its place for the first time.
func (x *request) place(seq int64, since Time) {
	x.seq, x.firstSeq = seq, seq
	x.since, x.firstSince = since, since
}

// list is one doubly linked list of requests; chain holds the links. A request
// is in one list of each chain at most.
type (
	list  struct{ head, tail RequestID }
	chain []links // by RequestID
	links struct{ next, prev RequestID }
)

var emptyList = list{none, none}

// insertAfter puts id behind after, or at the front if after is none.
func (c chain) insertAfter(l *list, after, id RequestID) {
	next := l.head
	if after == none {
		l.head = id
	} else {
		next = c[after].next
		c[after].next = id
	}
	if next == none {
		l.tail = id
	} else {
		c[next].prev = id
	}
	c[id] = links{next, after}
}

func (c chain) unlink(l *list, id RequestID) {
	x := c[id]
	if x.prev == none {
		l.head = x.next
	} else {
		c[x.prev].next = x.next
	}
	if x.next == none {
		l.tail = x.prev
	} else {
		c[x.next].prev = x.prev
	}
}

// insertBySeq gives id its place in l: a new request at the end, a requeued one near the front. It
// returns the request before it.
func (b *Batcher) insertBySeq(c chain, l *list, id RequestID) (after RequestID) {
	seq := b.requests[id].seq
	after = l.tail
	if after != none && b.requests[after].seq > seq {
		after = none
		for x := l.head; b.requests[x].seq < seq; x = c[x].next {
			after = x
		}
	}
	c.insertAfter(l, after, id)
	return after
}
