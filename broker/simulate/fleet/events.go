// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"container/heap"

	"github.com/ringbatch/ringbatch/broker/batcher"
)

type kind uint8

const (
	comes    kind = iota // a request, to some front
	frontDue             // a front's batcher wants to decide
	hostDue              // a host's
	delivers             // a parcel reaches its host
	computed             // a worker of a host has done a batch
	returns              // a parcel's last answer reaches its front
	reports              // hosts tell their load
	fails                // a host
	recovers
	givenUp // a relay gives up a parcel whose host failed
)

type event struct {
	at      batcher.Time
	order   uint64
	kind    kind
	index   int32 // of the front or host
	life    int
	worker  batcher.WorkerID
	batch   batcher.BatchID
	started batcher.Time
	parcel  *parcel
}

// events is a heap by time; what was scheduled first goes first.
type events struct {
	list   eventList
	pushed uint64
}

func (e *events) push(x event) {
	e.pushed++
	x.order = e.pushed
	heap.Push(&e.list, x)
}

func (e *events) pop() event  { return heap.Pop(&e.list).(event) }
func (e *events) empty() bool { return len(e.list) == 0 }

// next is when the next event is.
func (e *events) next() batcher.Time { return e.list[0].at }

type eventList []event

func (l eventList) Len() int { return len(l) }
func (l eventList) Less(i, j int) bool {
	return l[i].at < l[j].at || l[i].at == l[j].at && l[i].order < l[j].order
}
func (l eventList) Swap(i, j int) { l[i], l[j] = l[j], l[i] }
func (l *eventList) Push(x any)   { *l = append(*l, x.(event)) }
func (l *eventList) Pop() any {
	old := *l
	x := old[len(old)-1]
	*l = old[:len(old)-1]
	return x
}
