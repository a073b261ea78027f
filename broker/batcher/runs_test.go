// SPDX-License-Identifier: Apache-2.0

package batcher

import (
	"testing"

	"github.com/ringbatch/ringbatch/policy"
)

// isBeside checks how many batches were learned from beside 0, 1 and 2 others.
func isBeside(t *testing.T, l *learner, want ...int) {
	t.Helper()
	for j := range want {
		if got := l.shapes[0].curves[j].count; got != want[j] {
			t.Errorf("%d batches beside %d others, want %d", got, j, want[j])
		}
	}
}

func learnerWithWorkers(workers ...Worker) *learner {
	l := newLearner(&policy.Settings{MaxBatchSize: 8, WaitTime: policy.Auto})
	for i, w := range workers {
		w.ID = WorkerID(i)
		l.workerReady(w)
	}
	return l
}

func give(l *learner, w WorkerID, id BatchID, now Time) {
	l.arrived(&Request{ID: RequestID(id), Arrived: now, Rows: 1}, 0)
	l.dispatched(&Dispatch{Worker: w, Batch: id, Requests: []RequestID{RequestID(id)}, Rows: 1, PadTo: 1}, now)
}

// A worker may be done, and not have been seen to be, when the next batch is
// dispatched. If it counted as busy, batches that ran alone would be taken for some
// beside another, and the next slow one of these for news about the machine.
func TestAWorkerThatWasDoneWhenABatchBeganWasNotBusyBesideIt(t *testing.T) {
	l := learnerWithWorkers(Worker{}, Worker{})
	give(l, 0, 1, 1000)
	give(l, 1, 2, 2000) // worker 0 is done since 1995
	l.done(0, 1, 1005, 1995)
	l.done(1, 2, 2005, 3000)
	isBeside(t, l, 2, 0, 0)

	give(l, 0, 3, 4000) // ends before the next begins
	give(l, 1, 4, 5000)
	l.done(0, 3, 4005, 5003)
	l.done(1, 4, 5005, 6000)
	isBeside(t, l, 4, 0, 0)

	give(l, 0, 5, 7000)
	give(l, 1, 6, 7500)
	l.done(1, 6, 7505, 8500) // while 0 runs
	l.done(0, 5, 7005, 8600) // it began alone
	isBeside(t, l, 5, 1, 0)
}

// Runs are seen in the order in which the broker looks at workers, not in that of their ends.
func TestAWorkerThatWasSeenToBeDoneEarlierWasBusy(t *testing.T) {
	l := learnerWithWorkers(Worker{}, Worker{}, Worker{})
	give(l, 0, 1, 1000)
	give(l, 1, 2, 1000)
	give(l, 2, 3, 1995)
	l.done(0, 1, 1000, 2500)
	l.done(1, 2, 1000, 1990)
	l.done(2, 3, 1997, 3000)
	isBeside(t, l, 1, 2, 0)
}

func TestABatchThatGoesOnInAnotherLaneIsSeen(t *testing.T) {
	l := learnerWithWorkers(Worker{Depth: 3, Lanes: 3}, Worker{})
	give(l, 0, 1, 1000)
	give(l, 1, 2, 1050)
	give(l, 0, 3, 1100)
	l.done(0, 3, 1100, 1500)
	l.done(1, 2, 1050, 1700)
	isBeside(t, l, 0, 2, 0)
}

func TestAWorkerWithSeveralBatchesIsOneOther(t *testing.T) {
	l := learnerWithWorkers(Worker{Depth: 3, Lanes: 3}, Worker{})
	give(l, 0, 1, 1000)
	give(l, 0, 2, 1100)
	give(l, 0, 3, 1200)
	give(l, 1, 4, 2000)
	l.done(0, 2, 1100, 2500)
	l.done(0, 3, 1200, 2600)
	l.done(1, 4, 2000, 3000)
	l.done(0, 1, 1000, 3100)
	isBeside(t, l, 3, 1, 0)
}
