// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"time"

	"golang.org/x/sys/unix"
)

// Spin spins for a moment before its owner parks: waking a parked thread takes
// longer than everything else on the way of a request, and a core that
// slept runs a model's first steps more slowly.
//
// It spins only while that pays, judged by the last wait; so an owner
// without traffic parks at once. While it spins it yields the core to other
// threads. A yield that takes long shows that the cores are full: then a spin
// takes the core from the very process that the owner waits for, so the owner
// parks at once for a while. The zero value does not spin before Limit is set.
type Spin struct {
	Limit int64 // how long it spins, nanoseconds
	since int64 // when the owner began to wait, on Now's clock; 0 if it does not
	pays  bool  // the last wait was shorter than the limit
	rest  int64 // no spin before this time, on Now's clock
}

// LeastSpin is worth spinning for by anybody: the way of a request through
// client, broker and worker.
const LeastSpin = 50 * time.Microsecond

const (
	slowYield = 20 * time.Microsecond // a longer yield ran another thread
	spinRest  = 20 * time.Millisecond // no spin for this long after a slow yield
)

// Until spins until ready, or until it is time to park, or latest: then false.
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

// Over tells that what the owner waited for has come, if it did wait.
func (s *Spin) Over() {
	if s.since != 0 {
		s.pays = Now()-s.since < s.Limit
		s.since = 0
	}
}

// Anew tells that what the owner waits for could come only from that moment
// on: what was before does not count as waiting.
func (s *Spin) Anew(from int64) {
	if s.since != 0 {
		s.since = max(s.since, from)
	}
}

// yield lets another thread of any process have the core, if one waits for it.
func yield() { _, _, _ = unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0) }
