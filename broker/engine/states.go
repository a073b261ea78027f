// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"fmt"
	"slices"
)

// workerState is the state of a worker's session.
//
//	      promoted            strikes, back-off over
//	spare ─────────► serving ◄─────────► suspended
//	  │                 │                    │
//	  │                 ├────────────────────┘
//	  │                 │ it has a batch, and cannot be killed
//	  │                 ├──────► awaited ────► quarantined ──► serving, suspended: done after all
//	  │ killed, or dead │           │   (at once, if it has not hung up)
//	  ▼                 ▼           ▼               ▼
//	dying ◄─────────────┴───────────┴───────────────┘
//	  │ it can write no more
//	  ▼
//	gone
//
// A spare gets no batches until it takes the place of a worker that was lost. A
// suspended worker failed batches that others ran (suspend.go). A dying worker was
// killed, or is dead already; its slots are safe once it is gone. An awaited worker
// hung up with a batch and cannot be killed: it has time to turn out dead. A
// quarantined worker cannot be killed and may still write: its requests have ended,
// and their slots stay until it is done or dead.
type workerState uint8

const (
	workerSpare workerState = iota
	workerServing
	workerSuspended
	workerAwaited
	workerQuarantined
	workerDying
	workerGone
)

var workerStates = [...]string{"spare", "serving", "suspended", "awaited", "quarantined", "dying", "gone"}

func (s workerState) String() string { return workerStates[s] }

// workerMoves are the legal moves.
var workerMoves = [...][]workerState{
	workerSpare:       {workerServing, workerDying},
	workerServing:     {workerSuspended, workerAwaited, workerQuarantined, workerDying},
	workerSuspended:   {workerServing, workerAwaited, workerQuarantined, workerDying},
	workerAwaited:     {workerQuarantined, workerDying},
	workerQuarantined: {workerServing, workerSuspended, workerDying},
	workerDying:       {workerGone},
	workerGone:        {},
}

// isGivenUp says that the batcher no longer knows which batches such a worker has.
func (s workerState) isGivenUp() bool {
	return s == workerAwaited || s == workerQuarantined || s == workerDying
}

// moveTo changes the state of a worker's session. An illegal move is a bug of the engine.
func (w *WorkerSession) moveTo(to workerState) {
	if !slices.Contains(workerMoves[w.state], to) {
		panic(fmt.Sprintf("engine: worker %s goes from %v to %v", w.Label(), w.state, to))
	}
	w.state = to
}

// faults are the reasons to part with a worker.
type faults uint8

const (
	hungUp        faults = 1 << iota // its connection has ended
	outlivedLease                    // it was killed for that; see WorkerSession.hungWith
	brokeProtocol                    // it wrote nonsense; its ring is not read any more
)

func (f faults) has(x faults) bool { return f&x != 0 }

// clientState is the state of a client's session.
//
//	attached ──► leaving ──► left ──► returned
//
// A leaving client has requests in queues, which are canceled in turns. One that has
// left may have requests that workers run. When none is left its window returns.
type clientState uint8

const (
	clientAttached clientState = iota
	clientLeaving
	clientLeft
	clientReturned
)

var clientStates = [...]string{"attached", "leaving", "left", "returned"}

func (s clientState) String() string { return clientStates[s] }

// moveTo changes the state of a client's session, which only goes on to the next one.
// Another move is a bug of the engine.
func (c *ClientSession) moveTo(to clientState) {
	if to != c.state+1 {
		panic(fmt.Sprintf("engine: client %s goes from %v to %v", c.Label(), c.state, to))
	}
	c.state = to
}

// isAttached says that the client may commit.
func (c *ClientSession) isAttached() bool { return c.state == clientAttached }
