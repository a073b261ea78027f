// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"fmt"
	"slices"
)

// The states of sessions, and their legal moves.

// workerState is the state of a worker's session.
//
//	      promoted            strikes, back-off over
//	spare ─────────► serving ◄─────────► suspended
//	  │                 │                    │
//	  │                 ├────────────────────┘
//	  │                 │ it has a batch, and cannot be killed
//	  │                 ├──────► awaited ────► quarantined ──► serving, suspended: it finished after all
//	  │ killed, or dead │           │   (at once, if it has not hung up)
//	  ▼                 ▼           ▼               ▼
//	dying ◄─────────────┴───────────┴───────────────┘
//	  │ it can write no more
//	  ▼
//	gone
//
// A spare gets no batches until it takes the place of a lost worker. A suspended worker
// failed batches that others ran (suspend.go). An awaited worker hung up with a batch,
// cannot be killed, and may turn out dead. A quarantined worker cannot be killed and may
// still write: its requests have ended, and their slots stay until it is done or dead. A
// dying worker was killed, or is dead already. Its slots are safe once it is gone.
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

var workerMoves = [...][]workerState{
	workerSpare:       {workerServing, workerDying},
	workerServing:     {workerSuspended, workerAwaited, workerQuarantined, workerDying},
	workerSuspended:   {workerServing, workerAwaited, workerQuarantined, workerDying},
	workerAwaited:     {workerQuarantined, workerDying},
	workerQuarantined: {workerServing, workerSuspended, workerDying},
	workerDying:       {workerGone},
	workerGone:        {},
}

// isGivenUp says that the batcher has forgotten the worker's batches.
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
	outlivedLease                    // it was killed for its lease; see WorkerSession.hungWith
	brokeProtocol                    // it wrote nonsense; the loop no longer reads its ring
)

func (f faults) has(x faults) bool { return f&x != 0 }

// clientState is the state of a client's session.
//
//	attached ──► leaving ──► left ──► returned
//
// The loop cancels the queued requests of a leaving client in turns. A client that has
// left may have requests that workers run. After the last one its window returns.
type clientState uint8

const (
	clientAttached clientState = iota
	clientLeaving
	clientLeft
	clientReturned
)

var clientStates = [...]string{"attached", "leaving", "left", "returned"}

func (s clientState) String() string { return clientStates[s] }

// moveTo moves a client's session to the next state. Another move is a bug of the engine.
func (c *ClientSession) moveTo(to clientState) {
	if to != c.state+1 {
		panic(fmt.Sprintf("engine: client %s goes from %v to %v", c.Label(), c.state, to))
	}
	c.state = to
}

// isAttached says that the client may commit.
func (c *ClientSession) isAttached() bool { return c.state == clientAttached }
