// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"testing"
	"time"
)

func TestAWorkerThatHasABatchForUnusuallyLongIsNotReady(t *testing.T) {
	s := newModel(t, quietModel)
	ready := func() int { n, _ := countReady(s.st.listFitness()); return n }
	if n, why := countReady(s.st.listFitness()); n != 0 || why != "no worker attached" {
		t.Errorf("without workers %d are ready: %q", n, why)
	}
	s.attachWorker()
	s.attachClient()
	if ready() != 1 {
		t.Error("a worker that has just attached is not ready")
	}
	s.serve(t, 3)
	s.commitOne()
	for after, want := range map[time.Duration]int{0: 1, leastUnusual / 2: 1, 2 * leastUnusual: 0} {
		if s.l.now = s.now + int64(after); ready() != want {
			t.Errorf("with a batch for %v: %d workers are ready, want %d", after, ready(), want)
		}
	}
}
