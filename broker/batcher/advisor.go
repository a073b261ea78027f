// SPDX-License-Identifier: Apache-2.0

package batcher

import "github.com/ringbatch/ringbatch/policy"

// Advisor says how long requests wait for others, and which would be late. The
// batcher keeps the rules, asks the advisor, and reports everything that the
// advisor may learn from. FixedWait learns nothing; the Advisor of package auto
// learns.
//
// An advisor is as pure as the batcher: its answers follow from the calls and
// their times. It must not call the batcher.
type Advisor interface {
	// SetPolicy is called before anything else, and after each change.
	SetPolicy(s *policy.Settings)

	// IsLate says whether the batcher should refuse a request that arrives now,
	// because its answer would come too late.
	// r has its Cost here and in RequestQueued.
	IsLate(now Time, r Request, q Queue) bool
	// WaitFor is how long a request that begins to wait may wait for others.
	WaitFor(arrived, deadline Time, q Queue) Time
	// HoldUntil is the time until which batches that are not full stay in the queue although a
	// worker is idle. since is when the first of them could have gone. If the time has passed, they go.
	HoldUntil(since Time) Time

	WorkerReady(w Worker)
	WorkerGone(w WorkerID)
	RequestQueued(now Time, r Request)
	// RequestEnded reports when the client was answered; Never if that is unknown.
	RequestEnded(id RequestID, at Time)
	BatchSent(now Time, d Dispatch)
	// BatchUnanswered reports, before BatchDone, that the batch gave no client a result.
	BatchUnanswered(w WorkerID, id BatchID)
	BatchDone(w WorkerID, id BatchID, started, finished Time)

	// Learn may compute for some 10 µs. Batcher.Learn calls it.
	Learn(now Time)
}

// Queue describes the queue that a request joins.
type Queue struct {
	Requests int // waiting requests that go before it, or with it
	Rows     int // of those
	Cost     int // of these rows
	Clients  int // that are attached
}

// FixedWait is the advisor of a batcher that learns nothing: every request waits
// for Settings.WaitTime, and no request is refused as late.
type FixedWait struct{ wait Time }

var _ Advisor = (*FixedWait)(nil)

// SetPolicy takes the wait. Auto counts as no wait: a fixed wait cannot choose.
func (f *FixedWait) SetPolicy(s *policy.Settings) { f.wait = max(0, Time(s.WaitTime)) }

// WaitFor is the fixed wait.
func (f *FixedWait) WaitFor(Time, Time, Queue) Time { return f.wait }

// IsLate is false.
func (*FixedWait) IsLate(Time, Request, Queue) bool { return false }

// HoldUntil holds nothing.
func (*FixedWait) HoldUntil(Time) Time { return -Never }

// The events change nothing.

func (*FixedWait) WorkerReady(Worker)                      {}
func (*FixedWait) WorkerGone(WorkerID)                     {}
func (*FixedWait) RequestQueued(Time, Request)             {}
func (*FixedWait) RequestEnded(RequestID, Time)            {}
func (*FixedWait) BatchSent(Time, Dispatch)                {}
func (*FixedWait) BatchUnanswered(WorkerID, BatchID)       {}
func (*FixedWait) BatchDone(WorkerID, BatchID, Time, Time) {}
func (*FixedWait) Learn(Time)                              {}
