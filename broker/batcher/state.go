// SPDX-License-Identifier: Apache-2.0

package batcher

import "github.com/ringbatch/ringbatch/policy"

// Batcher is the state of one model's queue. Make one with New.
//
// Requests, clients and workers live in arrays indexed by their ids; lists and
// heaps between them are made of ids. So an event touches a handful of array
// elements and allocates nothing once the arrays are as long as the largest
// id.
type Batcher struct {
	settings policy.Settings
	advisor  Advisor
	heldFrom Time // since when the advisor holds a batch back; Never: none
	ranks    int  // base levels: the configured ones, and one behind them for delayed requests

	requests []request // by RequestID
	clients  []client  // by ClientID
	workers  []worker  // by WorkerID
	batches  []batch   // dispatched and not done

	freeBatches []int32

	inQueue  chain // waiting: its list of lists, or of retries; running: its batch
	byClient chain // waiting: its client's waiting requests
	inOrder  chain // waiting, with PreserveOrder: its list of orders

	shapes   shapeTable
	lists    []list // the queues: [shape*ranks + base level], each ordered by seq
	orders   []list // with PreserveOrder: the same with the held requests among them
	retries  []list // requests with a Share: [worker to avoid + 1], each ordered by seq (retry.go)
	retrying int    // requests in these lists

	// Where Decide looks for work (filing.go) and for workers (workers.go).
	anything, ready, full class
	idle, roomy           minHeap
	stale                 []int32 // shapes whose preferred size must be computed again

	// Timers.
	readies  timerQueue // by request: its ready time passes
	changes  timerQueue // by request: its deadline or its level's timeout passes
	reorders timerQueue // by shape: ageing may change the order that its preferred size depends on

	joined     int // clients that are attached
	joinable   int // attached clients that could join
	queued     int
	queuedRows int
	queuedCost int
	dated      int   // queued requests that have a deadline
	queuedAt   []int // by level asked for, which ageing and timeouts do not change

	credit   Time       // always credit, but in tests
	debtors  []ClientID // clients in debt
	owed     Queue      // their waiting requests
	lastGood Time       // when another client's request came

	lastSeq   int64
	frontSeq  int64 // of requests requeued without a record: below all others, decreasing
	lastSince Time
	lastBatch BatchID

	out       Decisions
	ids       []RequestID // backs Dispatch.Requests
	cancelled []RequestID // backs ClientLeft
}

// New makes an empty batcher with a fixed wait. The error wraps status.ErrInvalid and
// names the field of settings that is out of its range.
func New(settings policy.Settings) (*Batcher, error) {
	return NewAdvised(settings, &FixedWait{})
}

// NewAdvised makes an empty batcher that asks advisor how long to wait. The advisor
// belongs to this batcher alone.
func NewAdvised(settings policy.Settings, advisor Advisor) (*Batcher, error) {
	if err := settings.Validate(); err != nil {
		return nil, err
	}
	b := &Batcher{
		settings: settings.Clone(),
		advisor:  advisor,
		heldFrom: Never,
		credit:   credit,
		lastGood: -Never,
		shapes:   newShapeTable(),
	}
	b.sizeLevels()
	advisor.SetPolicy(&b.settings)
	return b, nil
}

// sizeLevels makes room for the configured number of levels. Nothing may be in
// a queue.
func (b *Batcher) sizeLevels() {
	b.ranks = b.settings.LevelCount() + 1
	b.lists = b.lists[:0:0]
	b.orders = b.orders[:0:0]
	b.lists = b.listsFor(len(b.shapes.shapes))
	for _, c := range []*class{&b.anything, &b.ready, &b.full} {
		c.heaps = make([]minHeap, b.ranks)
		c.occupied = 0
	}
	b.queuedAt = append(b.queuedAt, make([]int, b.ranks)...)[:b.ranks]
}

// Queued is the number of waiting requests.
func (b *Batcher) Queued() int { return b.queued }

// QueuedRows is the number of rows of all waiting requests.
func (b *Batcher) QueuedRows() int { return b.queuedRows }

// IdleWorkers is the number of workers that hold no batch.
func (b *Batcher) IdleWorkers() int { return len(b.idle.items) }

// Joinable is the number of clients that could join a batch now.
func (b *Batcher) Joinable() int { return b.joinable }

// Settings is a copy of the present policy.
func (b *Batcher) Settings() policy.Settings { return b.settings.Clone() }
