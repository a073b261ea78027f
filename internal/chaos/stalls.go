// SPDX-License-Identifier: Apache-2.0

package chaos

import (
	"sync"
	"time"
)

// stalls remembers when this machine did not run a process that was ready to
// run: what took long meanwhile is nobody's fault here.
type stalls struct {
	mu   sync.Mutex
	all  []stall
	over chan struct{}
}

type stall struct{ from, to time.Time }

const (
	stallTick = 5 * time.Millisecond
	stallMost = 15 * time.Millisecond // longer than that is a stall
)

func (s *stalls) watch() {
	s.over = make(chan struct{})
	go func() {
		for from := time.Now(); ; {
			select {
			case <-s.over:
				return
			case <-time.After(stallTick):
			}
			to := time.Now()
			if to.Sub(from) > stallMost {
				s.mu.Lock()
				s.all = append(s.all, stall{from, to})
				s.mu.Unlock()
			}
			from = to
		}
	}()
}

func (s *stalls) end() { close(s.over) }

// between reports whether there was one.
func (s *stalls) between(from, to time.Time) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := len(s.all) - 1; i >= 0 && s.all[i].to.After(from); i-- {
		if s.all[i].from.Before(to) {
			return true
		}
	}
	return false
}
