// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"time"

	"golang.org/x/sys/unix"
)

// Spin lets its owner spin for a moment before it parks. Waking a parked thread takes
// longer than all other steps of a request, and a core that slept runs slowly at first.
//
// The owner spins only if the last wait was short; without traffic it parks at once.
// While it spins it yields the core to other threads. A slow yield shows that all cores
// are busy. Then a spin would take the core from the peer that the owner waits for, so
// the owner parks at once for a while. The zero value does not spin until Limit is set.
type Spin struct {
	Limit int64 // of a spin, nanoseconds
	since int64 // start of the wait, on Now's clock; 0 if the owner does not wait
	pays  bool  // the last wait was shorter than Limit
	rest  int64 // no spin before this time, on Now's clock
}

// LeastSpin is the least useful Limit: the time of a request from client through broker
// to worker.
const LeastSpin = 50 * time.Microsecond

const (
	slowYield = 100 * time.Microsecond // a longer yield ran another thread
	spinRest  = 20 * time.Millisecond  // no spin for this long after a slow yield
)

// Until spins until ready returns true. It returns false when it is time to park, or latest has passed.
func (s *Spin) Until(ready func() bool, latest int64) bool {
	now := Now()
	if s.since == 0 {
		s.since = now
	}
	if !s.pays || now < s.rest {
		return false
	}
	for end := min(s.since+s.Limit, latest); now < end; {
		if ready() {
			return true
		}
		before := now
		yield()
		if now = Now(); now-before > int64(slowYield) {
			s.rest = now + int64(spinRest)
			return ready()
		}
	}
	return false
}

// Over ends the wait: the event that the owner waited for has come.
func (s *Spin) Over() {
	if s.since != 0 {
		s.pays = Now()-s.since < s.Limit
		s.since = 0
	}
}

// Anew restarts the wait at a later time: the event could not come before.
func (s *Spin) Anew(from int64) {
	if s.since != 0 {
		s.since = max(s.since, from)
	}
}

// yield gives the core to another thread, of any process, that waits for it.
func yield() { _, _, _ = unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0) }
