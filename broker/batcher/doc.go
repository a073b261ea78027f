// SPDX-License-Identifier: Apache-2.0

// Package batcher decides which waiting requests form the next batch, and for
// whom. It is pure: (state, event, now) → decisions. It has no clock, no I/O
// and no goroutine, so the broker (real time), the simulator (virtual time)
// and the tests (scripts) drive exactly the same code.
//
// The caller reports events (a client attached, a request arrived, a worker
// finished …) and then calls Decide, which returns what to do now and when to
// call again if nothing happens before that.
//
// Not safe for concurrent use: one goroutine owns a Batcher.
//
// # The rules
//
// 1. A batch has one shape (the bucketed Dims). Inside a shape levels are
// served strictly in order, and requests of a level in the order of their
// Arrive calls. Packing takes requests in that order, never splits one, never
// skips ahead: it stops at the first that does not fit.
//
// 2. A worker that is idle (runs fewer batches than it has lanes, most have one) gets a batch of a shape as soon as
// one of these holds; the first that does names the batch and its size:
//
//	Full       the queue fills MaxBatchSize, or the next request does not fit
//	Preferred  packing reaches one of PreferredBatchSizes exactly; the largest counts
//	Deadline   the ready time of any waiting request of the shape has passed
//	Nobody     no client is left who could join
//
// The ready time is Arrived + min(wait, budget/2), where the budget is the
// time to its deadline, or to the queue timeout that would reject it: a
// request never spends more than half of its own time waiting for others.
// Deadline and Nobody take all that fits, preferred size or not.
//
// The wait is what the Advisor says (advisor.go). An advisor may also hold back batches
// that are not full, and what is behind them, while another batch runs; but nothing is held
// back while a request with a deadline waits.
//
// 3. A client could join while it has fewer requests in flight (waiting and
// running) than its recent peak, at least 1. The peak is taken over its
// present and its last period of 16 ended requests. So a client that waits
// for each answer never waits for itself, and an attached client that is idle
// could always join.
//
// 4. A busy worker with room (Depth) gets only full batches: the others
// wait for an idle worker and keep growing. It gets none while a worker is
// idle, and none that would overtake a batch which goes before it (rule 5) but
// is not full; otherwise full batches could keep all workers busy for ever and
// starve a retry or a rare shape.
//
// 5. When several shapes are ready, retries go first, oldest first; then
// the shape whose first request has the most urgent level, then the one whose
// first request arrived first. A shape never closes another's batch.
//
// 6. Among idle workers, and then among busy ones with room, the one with the
// fewest rows per weight so far is chosen (stride scheduling), then the one
// with the smallest id. A new worker, or one that was paused, starts at the smallest
// count there is. A paused worker gets nothing.
//
// 7. A request whose Deadline has come is never dispatched: it ends Expired.
// MaxTimeout of its level shortens the deadline. When it has waited for its
// level's DefaultTimeout it ends TimedOut (Reject), or moves behind everything
// that has not timed out (Delay), as if it had arrived there just then.
//
// 8. A retry (Share is not 0) is for an idle worker only. It goes neither to the worker
// that it avoids, if another one is not paused, nor to a doubted one, if one without
// doubts is left. Retries that avoid the same worker share a batch: in order, of one
// shape, and no more of them than the smallest Share.
//
// 9. Ageing lifts a waiting request by one level for each Ageing waited. Among
// those of the level it reaches, it has the place of its arrival.
//
// 10. With PreserveOrder requests of one client run in at most one batch at a
// time and never overtake each other. What follows an earlier request may share
// its batch if it has the same shape and no more urgent level; otherwise it is
// held until that batch is done, and keeps its place meanwhile.
//
// 11. Padding never changes what is packed: Dispatch.PadTo only tells the worker
// how many rows to see.
//
// 12. Decide does all that is possible at now, and says when to wake up. What
// only time can bring about is a deadline, a timeout, and, while a worker is
// idle, a ready time.
//
// # Where it is
//
//	batcher.go    the types: Request, Worker, Decisions; settings.go what follows from a policy
//	advisor.go    Advisor: how long to wait, and what is late; FixedWait
//	events.go     Arrive, Requeue, Cancel, Ended
//	clients.go    who could join
//	workers.go    whose turn it is; BatchDone
//	decide.go     Decide, stage by stage; dispatch.go packs a batch
//	retry.go      requests that are run again
//	queue.go      the queues; filing.go finds the shape that goes first
//	preferred.go  preferred sizes; order.go PreserveOrder; setpolicy.go changes
//	shapes.go, requests.go, timers.go, heap.go   the structures underneath
//
// The scripts in testdata show each rule at work. reference_test.go has the
// same rules once more, slow and plain, and schedule_test.go compares the two.
package batcher
