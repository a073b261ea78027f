// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"slices"
	"testing"
	"unsafe"
)

func TestTheBooksOfASlotFitTwoLinesOfTheCache(t *testing.T) {
	if n := unsafe.Sizeof(slotInfo{}); n > 128 {
		t.Errorf("%d bytes", n)
	}
}

func TestEveryStateOfAWorkerCanBeReachedAndLeavesForGone(t *testing.T) {
	reached := []workerState{workerSpare}
	for i := 0; i < len(reached); i++ {
		for _, to := range workerMoves[reached[i]] {
			if !slices.Contains(reached, to) {
				reached = append(reached, to)
			}
		}
	}
	if len(reached) != len(workerStates) {
		t.Errorf("only %v can be reached", reached)
	}
	for from, moves := range workerMoves {
		if s := workerState(from); s != workerGone && s != workerDying && !slices.Contains(moves, workerDying) {
			t.Errorf("a worker that is %v cannot die", s)
		}
	}
}

func TestAnIllegalMoveIsABug(t *testing.T) {
	for name, move := range map[string]func(){
		"a worker comes back from death":         func() { (&WorkerSession{Peer: &Peer{}, state: workerGone}).moveTo(workerServing) },
		"a worker is gone that may still write":  func() { (&WorkerSession{Peer: &Peer{}, state: workerServing}).moveTo(workerGone) },
		"a client's window returns while it has": func() { (&ClientSession{Peer: &Peer{}}).moveTo(clientReturned) },
	} {
		t.Run(name, func(t *testing.T) {
			defer func() {
				if recover() == nil {
					t.Error("it is let through")
				}
			}()
			move()
		})
	}
}
