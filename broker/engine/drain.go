// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"time"

	"github.com/ringbatch/ringbatch/status"
)

// The end of requests and sessions that a loop cannot finish while it drains.

// EndUnserved ends the queued requests of models that have had no worker for grace, and
// get none. Clients may send them again, to another broker. It is called on the loop.
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

// refuseQueued ends all queued requests.
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

// SendIdleClientsOn hangs up on clients without requests, which then find the other
// broker. Clients of private models stay: their slots would be cleared before they have
// read their answers.
func (l *Loop) SendIdleClientsOn() {
	for r := range l.rings {
		for c := range r.clients {
			if c.busy == 0 && !r.stages[0].settings.Private {
				r.clientLeft(c, "another broker takes over")
			}
		}
	}
}
