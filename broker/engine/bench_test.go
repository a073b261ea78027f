// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
)

// BenchmarkRound measures a loop alone: 8 clients commit 16 requests each, and one
// worker answers. It must not allocate.
func BenchmarkRound(b *testing.B) {
	const clients, inFlight = 8, 16
	s := newModel(b, policy.New(policy.Slots(clients*inFlight), policy.Lease(time.Hour),
		policy.MaxBatchSize(clients*inFlight/2), policy.WaitTime(0)))
	s.attachWorker()
	w := s.workers[0]
	var sessions []*ClientSession
	var rings []shm.Producer[shm.Commit]
	for range clients {
		c, err := s.attach("client", inFlight)
		must.Do(b, err)
		sessions = append(sessions, c)
		rings = append(rings, shm.Producer[shm.Commit]{Ring: shm.CommitRing(c.seg, inFlight)})
	}
	e := shm.Commit{Kind: shm.KindCommit, Level: -1, Rows: 1}
	b.ReportAllocs()
	for n := 0; n < b.N; n += clients * inFlight {
		e.Gen++
		e.Committed = s.now
		for i, c := range sessions {
			for slot := range uint32(inFlight) {
				e.Slot = c.first + slot
				rings[i].Push(&e)
			}
		}
		s.l.beginRound()
		for _, c := range sessions {
			s.r.clientRang(c)
		}
		s.l.settleRound()
		for w.next < w.box.Tail.Load() {
			mail, reqs := w.box.At(w.next)
			w.next++
			w.box.Taken.Store(w.next)
			for _, q := range reqs[:mail.Requests] {
				s.r.board.End(q.Slot, q.Gen, status.OK, false)
			}
			w.done.Push(&shm.Done{Batch: mail.Batch, Started: s.now, Finished: s.now})
			s.st.touch()
			s.l.settleRound()
		}
		s.now += int64(time.Millisecond)
	}
}
