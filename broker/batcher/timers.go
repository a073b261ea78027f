// SPDX-License-Identifier: Apache-2.0

package batcher

// timerQueue holds at most one point in time per small id and gives the
// earliest back, ties by the smaller tie.
//
// Most timers are set in the order in which they will run out (now plus a constant), so they go to
// the end of a sorted list. A timer whose place is further than maxWalk from the end goes to
// the heap.
type timerQueue struct {
	nodes      []timerNode // by id
	head, tail uint32      // the list; nodes[x] is valid only if it says inList
	listed     int
	heap       minHeap
}

type timerNode struct {
	at, tie    int64
	next, prev uint32
	where      timerPlace
}

type timerPlace uint8

const (
	notSet timerPlace = iota
	inList
	inHeap
)

// maxWalk lets requests that several clients committed at nearly the same
// time, reported slightly out of order, still take the list.
const maxWalk = 16

// add sets the timer of id, which must not be set.
func (q *timerQueue) add(id uint32, at Time, tie int64) {
	q.nodes = grown(q.nodes, int(id))
	n := &q.nodes[id]
	n.at, n.tie = int64(at), tie
	if q.listed == 0 {
		q.head, q.tail, q.listed, n.where = id, id, 1, inList
		return
	}
	after := q.tail
	for range maxWalk {
		a := &q.nodes[after]
		if a.at < n.at || (a.at == n.at && a.tie <= n.tie) {
			q.insertAfter(after, id)
			return
		}
		if after == q.head {
			n.where, n.next = inList, q.head
			a.prev = id
			q.head = id
			q.listed++
			return
		}
		after = a.prev
	}
	n.where = inHeap
	q.heap.set(id, n.at, n.tie)
}

func (q *timerQueue) insertAfter(after, id uint32) {
	n, a := &q.nodes[id], &q.nodes[after]
	n.where, n.prev = inList, after
	if after == q.tail {
		q.tail = id
	} else {
		n.next = a.next
		q.nodes[a.next].prev = id
	}
	a.next = id
	q.listed++
}

// remove clears the timer of id; it is no error if none is set.
func (q *timerQueue) remove(id uint32) {
	if int(id) >= len(q.nodes) {
		return
	}
	n := &q.nodes[id]
	switch n.where {
	case inHeap:
		q.heap.remove(id)
	case inList:
		q.listed--
		switch {
		case q.listed == 0:
		case id == q.head:
			q.head = n.next
		case id == q.tail:
			q.tail = n.prev
		default:
			q.nodes[n.prev].next = n.next
			q.nodes[n.next].prev = n.prev
		}
	}
	n.where = notSet
}

// first is the id whose timer runs out first, and when; Never if none is set.
func (q *timerQueue) first() (id uint32, at Time) {
	if q.listed == 0 {
		if q.heap.empty() {
			return 0, Never
		}
		m := q.heap.min()
		return m.id, Time(m.key)
	}
	n := &q.nodes[q.head]
	if !q.heap.empty() {
		if m := q.heap.min(); m.less(heapItem{key: n.at, tie: n.tie}) {
			return m.id, Time(m.key)
		}
	}
	return q.head, Time(n.at)
}

func (q *timerQueue) clear() {
	for q.listed > 0 {
		q.remove(q.head)
	}
	for !q.heap.empty() {
		q.remove(q.heap.min().id)
	}
}
