// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"time"

	"github.com/ringbatch/ringbatch/status"
)

// unservedPoll is how often a drain looks for models that have no worker.
const unservedPoll = 100 * time.Millisecond

// endUnserved ends what waits in models that have had no worker for grace, and
// get none. Its callers may send it again, to another broker.
func (l *loop) endUnserved(grace time.Duration, mayServe func(model string) bool) {
	for r := range l.rings {
		for _, s := range r.stages {
			since := max(s.vacant, l.drainSince)
			if s.present == 0 && s.batcher.Queued() > 0 && l.now >= since+int64(grace) && !mayServe(s.cfg.Name) {
				s.log.Warn("no worker is there to finish what was accepted: it ends as Draining", "requests", s.batcher.Queued())
				s.refuseQueued(status.ErrDraining)
			}
		}
	}
}

// refuseQueued ends everything that waits.
func (s *stage) refuseQueued(code status.Code) {
	s.touch()
	for c := range s.ring.clients {
		for i := c.first; i < c.first+uint32(c.window); i++ {
			if info := s.ring.slot(i); info.state == queued && info.head == i && info.stage == s {
				s.withdraw(i)
				s.ring.end(i, code, "", false)
				s.ring.free(i)
			}
		}
	}
}
