// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"time"

	"github.com/ringbatch/ringbatch/status"
)

// EndUnserved ends what waits in models that have had no worker for grace, and
// get none. Clients may send it again, to another broker. It is called on the loop.
func (l *Loop) EndUnserved(grace time.Duration, mayServe func(model string) bool) {
	for r := range l.rings {
		for _, s := range r.stages {
			since := max(s.vacant, l.drainSince)
			if s.present == 0 && s.batcher.Queued() > 0 && l.now >= since+int64(grace) && !mayServe(s.name) {
				s.log.Warn("no worker is there to finish what was accepted: it ends as Draining", "requests", s.batcher.Queued())
				s.refuseQueued(status.ErrDraining)
			}
		}
	}
}

// refuseQueued ends everything that waits.
func (s *Stage) refuseQueued(code status.Code) {
	s.touch()
	for c := range s.ring.clients {
		for i := c.first; i < c.first+uint32(c.window); i++ {
			if info := s.ring.slot(i); info.state == queued && info.head == i && info.stage == s {
				s.withdrawRequest(i)
				s.ring.endRequest(i, code, "", false)
				s.ring.freeRequest(i)
			}
		}
	}
}

// SendIdleClientsOn hangs up on the clients that have nothing under way: they find
// the other broker, instead of being refused here until the last request of others
// is done. Not on those of private models, whose slots would be cleared before
// they have read their answers.
func (l *Loop) SendIdleClientsOn() {
	for r := range l.rings {
		for c := range r.clients {
			if c.busy == 0 && !r.stages[0].settings.Private {
				r.clientLeft(c, "another broker takes over")
			}
		}
	}
}
