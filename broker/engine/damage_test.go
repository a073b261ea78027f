// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"testing"

	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
)

// A worker can write the board, so it can damage words. The broker repairs the word
// and ends the request for its client.
func TestAWordThatAWorkerDamagedIsRepaired(t *testing.T) {
	for name, garbage := range map[string]shm.Word{
		"later": shm.MakeWord(9, status.OK, false), "much later": shm.MakeWord(1<<31, status.ErrFailed, true),
		"never": shm.MakeWord(0xffffffff, 77, true),
	} {
		t.Run(name, func(t *testing.T) {
			s := newWorld(t, 3)
			s.calm = true
			s.attachWorker()
			s.attachClient()
			c, w := s.clients[0], s.workers[0]
			c.commit()
			for len(w.batches) == 0 {
				s.now += 1_000_000
				s.round(s.l)
				w.take()
			}
			slot := w.batches[0].reqs[0].Slot
			s.r.board.Repair(slot, garbage.Generation(), garbage.Status(), garbage.Held())
			w.batches[0].wrote, w.batches[0].ended = len(w.batches[0].reqs), len(w.batches[0].reqs)
			w.work() // done
			s.st.touch()
			s.l.settleRound()
			if word := s.r.board.Word(slot); word.Generation() != c.slots[slot-c.sess.first].gen || word.Status() != status.ErrFailed {
				t.Errorf("the client sees %v", word)
			}
		})
	}
}
