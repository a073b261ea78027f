// SPDX-License-Identifier: Apache-2.0

package simulate

import "github.com/ringbatch/ringbatch/broker/batcher"

// event is something that the broker sees.
type event struct {
	at     batcher.Time
	order  uint64 // ties: what was scheduled first
	kind   eventKind
	number uint32           // commitSeen: the how-maniest commit, from 1
	client batcher.ClientID // commitSeen
	stage  int              // batchSeenDone
	worker batcher.WorkerID // batchSeenDone
	batch  batcher.BatchID  // batchSeenDone
	// commitSeen: the commit; batchSeenDone: when the worker began and ended.
	started, finished batcher.Time
}

type eventKind uint8

const (
	commitSeen eventKind = iota
	batchSeenDone
)

func (a *event) before(b *event) bool {
	return a.at < b.at || (a.at == b.at && a.order < b.order)
}

// eventQueue is a binary heap.
type eventQueue struct {
	heap   []event
	pushed uint64
}

func (q *eventQueue) empty() bool   { return len(q.heap) == 0 }
func (q *eventQueue) first() *event { return &q.heap[0] }

func (q *eventQueue) push(e event) {
	q.pushed++
	e.order = q.pushed
	q.heap = append(q.heap, e)
	i := len(q.heap) - 1
	for i > 0 {
		parent := (i - 1) / 2
		if !e.before(&q.heap[parent]) {
			break
		}
		q.heap[i] = q.heap[parent]
		i = parent
	}
	q.heap[i] = e
}

func (q *eventQueue) pop() event {
	top := q.heap[0]
	last := len(q.heap) - 1
	e := q.heap[last]
	q.heap = q.heap[:last]
	if last == 0 {
		return top
	}
	i := 0
	for {
		child := 2*i + 1
		if child >= last {
			break
		}
		if child+1 < last && q.heap[child+1].before(&q.heap[child]) {
			child++
		}
		if !q.heap[child].before(&e) {
			break
		}
		q.heap[i] = q.heap[child]
		i = child
	}
	q.heap[i] = e
	return top
}
