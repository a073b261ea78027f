// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"container/heap"

	"github.com/ringbatch/ringbatch/broker/batcher"
)

// event is something that the broker sees: a commit, or the end of a batch.
type event struct {
	at                batcher.Time
	order             int              // of scheduling; breaks ties
	number            uint32           // of a commit, from 1; 0: a batch or a round ended
	client            batcher.ClientID // of a commit
	worker            batcher.WorkerID // of a batch
	round             bool             // of that worker with lanes ends
	batch             batcher.BatchID
	started, finished batcher.Time // of a batch; started is also the time of a commit
}

// eventQueue gives events back in the order of time.
type eventQueue struct {
	events []*event
	pushed int
}

func (q *eventQueue) push(e event) {
	q.pushed++
	e.order = q.pushed
	heap.Push(q, &e)
}

func (q *eventQueue) pop() *event { return heap.Pop(q).(*event) }

// next is the time of the first event; Never if there is none.
func (q *eventQueue) next() batcher.Time {
	if len(q.events) == 0 {
		return batcher.Never
	}
	return q.events[0].at
}

// The methods below are for container/heap.

func (q *eventQueue) Len() int      { return len(q.events) }
func (q *eventQueue) Swap(i, j int) { q.events[i], q.events[j] = q.events[j], q.events[i] }
func (q *eventQueue) Push(e any)    { q.events = append(q.events, e.(*event)) }

func (q *eventQueue) Less(i, j int) bool {
	a, b := q.events[i], q.events[j]
	return a.at < b.at || a.at == b.at && a.order < b.order
}

func (q *eventQueue) Pop() any {
	last := len(q.events) - 1
	e := q.events[last]
	q.events = q.events[:last]
	return e
}
