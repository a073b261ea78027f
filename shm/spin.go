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
// It does so only while that pays, which the last wait tells; so an owner
// without traffic parks at once. It yields the core to others who want it.
// The zero value does not spin before Limit is set.
type Spin struct {
	Limit int64 // how long it spins, nanoseconds
	since int64 // when the owner began to wait, on Now's clock; 0 if it does not
	pays  bool  // the last wait was shorter than the limit
}

// LeastSpin is worth spinning for by anybody: the way of a request through
// client, broker and worker.
const LeastSpin = 50 * time.Microsecond

// Until spins until ready, or until it is time to park, or latest: then false.
func (s *Spin) Until(ready func() bool, latest int64) bool {
	now := Now()
	if s.since == 0 {
		s.since = now
	}
	if !s.pays {
		return false
	}
	for end := min(s.since+s.Limit, latest); now < end; now = Now() {
		if ready() {
			return true
		}
		yield()
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
