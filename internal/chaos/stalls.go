// SPDX-License-Identifier: Apache-2.0

package chaos

import (
	"sync"
	"time"

	"github.com/ringbatch/ringbatch/internal/testbed"
)

// stalls remembers when this machine did not run a process that was ready to
// run: what took long meanwhile is nobody's fault here.
type stalls struct {
	mu      sync.Mutex
	all     []stall
	longest time.Duration
	over    chan struct{}
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
			from = s.note(from)
		}
	}()
	testbed.WatchCPUs(s.over, stallTick, func(began time.Time) { s.note(began) })
}

// note keeps the time since from if it was a stall.
func (s *stalls) note(from time.Time) (now time.Time) {
	now = time.Now()
	if d := now.Sub(from); d > stallMost {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.all = append(s.all, stall{from, now})
		s.longest = max(s.longest, d)
	}
	return now
}

func (s *stalls) end() { close(s.over) }

// between reports whether there was one.
func (s *stalls) between(from, to time.Time) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := len(s.all) - 1; i >= 0 && s.all[i].to.After(from); i-- { // in the order of their ends
		if s.all[i].from.Before(to) {
			return true
		}
	}
	return false
}

// most is how long the longest took.
func (s *stalls) most() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.longest
}
