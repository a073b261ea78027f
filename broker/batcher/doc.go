// SPDX-License-Identifier: Apache-2.0

// Package batcher decides which waiting requests form the next batch, and for which worker. It is
// pure: (state, event, now) → decisions. It has no clock, no I/O and no goroutine. So the broker
// (real time), the simulator (virtual time) and the tests (scripts) drive the same code.
//
// The caller reports events (a client attached, a request arrived, a worker finished …) and then
// calls Decide. Decide returns the decisions, and when to call again if no event comes first.
//
// Not safe for concurrent use: one goroutine owns a Batcher.
//
// # The rules
//
// 1. A batch has one shape (the bucketed Dims). Inside a shape, levels are served strictly in
// order, and requests of a level in the order of their Arrive calls. Packing takes requests in
// that order, never splits one, and stops at the first that does not fit. The rows of a batch are at
// most MaxBatchSize and, if it is set, their costs at most MaxBatchCost. A single request may cost more.
// With a MaxBatchSize of 1, MaxBatchCost limits all that a worker holds (its lanes).
//
// 2. A worker is idle while it runs fewer batches than it has lanes; most have one. An idle worker
// gets a batch of a shape as soon as one of these holds. The first one names the batch and its size:
//
//	Full       the queue fills MaxBatchSize or MaxBatchCost, or the next request does not fit
//	Preferred  packing reaches one of PreferredBatchSizes exactly; the largest counts
//	Deadline   the ready time of any waiting request of the shape has passed
//	Nobody     no other client could join
//
// The ready time is Arrived + min(wait, budget/2). The budget is the time to the deadline, or to the
// queue timeout that would reject the request. Deadline and Nobody take all requests that fit,
// preferred size or not.
//
// The Advisor chooses the wait (advisor.go). While a batch runs, the advisor may hold back batches
// that are not full. Nothing overtakes them. Nothing is held back while a request with a deadline waits.
//
// 3. A client could join while it has fewer requests in flight (waiting and running) than its recent
// peak, at least 1. The peak covers its present and its last period of 16 ended requests. So a
// client that waits for each answer never waits for itself, and an idle client could always join.
//
// 4. A busy worker with room (Depth) gets only full batches: the others wait for an idle worker and
// keep growing. A busy worker gets no batch while a worker is idle, and none that would overtake a batch
// which goes before it (rule 5) but is not full. Otherwise full batches could keep all workers
// busy, and starve a retry or a rare shape.
//
// 5. When several shapes are ready, retries go first, oldest first, but not those of clients in debt. Then comes the shape whose first
// request has the most urgent level, then the shape whose first request arrived first. A shape
// never closes another's batch.
//
// 6. Among idle workers, and then among busy ones with room, the worker with the fewest rows per
// share so far is chosen (stride scheduling), then the smallest id. A new worker, and a worker
// after its pause, start at the smallest count. A paused worker gets nothing.
//
// 7. A request whose Deadline has come is never dispatched: it ends Expired. MaxTimeout of its level
// shortens the deadline. After its level's DefaultTimeout in the queue it ends TimedOut (Reject), or
// moves behind all requests that have not timed out (Delay), as if it had arrived there just then.
//
// 8. A retry (Share is not 0) needs an idle worker. It does not go to the worker that it avoids if
// another is not paused, nor to a doubted worker if a trusted one is left. Retries that avoid the
// same worker share a batch: in order, of one shape, and at most as many as the smallest Share.
// A retry with a Share of 1 that avoids no worker was in a worker that died: on a worker with several lanes
// it runs by itself, and idle workers with less room than a retry needs get nothing else before.
//
// 9. Ageing lifts a waiting request by one level for each Ageing waited. In the level that it
// reaches, it has the place of its arrival.
//
// 10. With PreserveOrder, requests of one client run in at most one batch at a time and never
// overtake each other. A request may share the batch of an earlier one if it has the same
// shape and no more urgent level. Otherwise it is held until that batch is done, and keeps its place.
//
// 11. Padding never changes the packing: Dispatch.PadTo is the number of rows that the worker sees.
//
// 12. Decide does everything that is possible at now, and says when to wake up: at the next deadline
// or timeout and, while a worker is idle, at the next ready time.
//
// 13. What a client's failures cost the workers (Charge) counts against its turn. A client in debt
// shares no batch with others. It gets a batch when nothing else is ready and its turn has come:
// none of its requests runs, and the others had the workers for eight times the cost; or the
// others have sent nothing for as long as the last failure took. See accounts.go.
//
// # Files
//
//	batcher.go    the types: Request, Worker, Decisions; settings.go derives values from a policy
//	advisor.go    Advisor: how long to wait, and which requests are late; FixedWait
//	events.go     Arrive, Requeue, Cancel, Ended
//	clients.go    which clients could join
//	workers.go    which worker is next; BatchDone
//	decide.go     Decide, stage by stage; dispatch.go packs a batch
//	retry.go      requests that run again; accounts.go clients in debt
//	queue.go      the queues; filing.go finds the shape that goes first
//	preferred.go  preferred sizes; order.go PreserveOrder; setpolicy.go changes
//	shapes.go, requests.go, timers.go, heap.go   data structures
//
// The scripts in testdata show each rule at work. reference_test.go has the same rules once more,
// slow and plain, and schedule_test.go compares the two.
package batcher
