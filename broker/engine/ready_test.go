// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/shm"
)

func TestAWorkerThatHasABatchForUnusuallyLongDoesNotCount(t *testing.T) {
	h, err := newHost(1, 1, 0)
	if err != nil {
		t.Fatal(err)
	}
	s, err := h.add(quietModel)
	if err != nil {
		t.Fatal(err)
	}
	defer s.close()
	h.calm = true
	ready := func() int { n, _ := judge(s.st.fitWorkers()); return n }
	if n, why := judge(s.st.fitWorkers()); n != 0 || why != "no worker attached" {
		t.Errorf("without workers %d are ready: %q", n, why)
	}
	s.attachWorker()
	s.attachClient()
	s.workers[0].garbage, s.clients[0].garbage = false, false
	if ready() != 1 {
		t.Error("one that has just attached does not count")
	}
	served(t, s, 3)
	c, x := s.clients[0], &s.clients[0].slots[0]
	x.gen++
	c.ring.Push(&shm.Commit{Kind: shm.KindCommit, Level: -1, Rows: 1, Slot: c.sess.first, Gen: x.gen, Committed: s.now})
	s.l.beginRound()
	s.r.clientRang(c.sess)
	s.l.settleRound()
	for after, want := range map[time.Duration]int{0: 1, leastUnusual / 2: 1, 2 * leastUnusual: 0} {
		if s.l.now = s.now + int64(after); ready() != want {
			t.Errorf("with a batch for %v: %d workers are ready, want %d", after, ready(), want)
		}
	}
}
