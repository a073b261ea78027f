// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"log/slog"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

// BenchmarkRound is what a loop itself spends on a request: 8 clients commit 16
// each, one worker answers. It must not allocate.
func BenchmarkRound(b *testing.B) {
	const clients, inFlight = 8, 16
	h, err := newHost(1, 1, 0)
	if err != nil {
		b.Fatal(err)
	}
	defer h.close()
	h.calm = true
	s, err := h.add(policy.New(policy.Slots(clients*inFlight), policy.Lease(time.Hour),
		policy.MaxBatchSize(clients*inFlight/2), policy.WaitTime(0)))
	if err != nil {
		b.Fatal(err)
	}
	s.attachWorker()
	w := s.workers[0]
	var sessions []*ClientSession
	var rings []shm.Producer[shm.Commit]
	for range clients {
		c, err := s.attach("client", inFlight)
		if err != nil {
			b.Fatal(err)
		}
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

// What `private` costs when a client leaves: its window is cleared, away from
// the loop.
func BenchmarkClearingAWindow(b *testing.B) {
	sig, err := tensor.ParseSignature([]string{"x:u8[602112]"}, []string{"y:f32[1000]"})
	if err != nil {
		b.Fatal(err)
	}
	layout, err := shm.NewLayout(sig, 64, 8)
	if err != nil {
		b.Fatal(err)
	}
	r, err := NewRing(&RingSpec{Name: "m", Layout: layout, Memory: shm.Memfd{}, Epoch: 1, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		b.Fatal(err)
	}
	defer r.Close()
	const window = 8
	r.clearSlots(0, window) // the pages are there
	b.SetBytes(window * layout.SlotBytes())
	for b.Loop() {
		r.clearSlots(0, window)
	}
}
