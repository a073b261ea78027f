package worker

import (
	"time"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/shm"
)

// spin looks out for the next mail for a moment before the worker parks:
// waking a parked thread takes longer than everything else on the way of a
// mail, and a core that slept runs a model's first steps more slowly.
//
// It does so only while that pays, which the last mail tells; so a worker
// without work parks at once. It yields the core to whoever else wants it.
type spin struct {
	limit int64 // how long it spins, nanoseconds
	since int64 // when the worker ran out of mails, on Now's clock; 0 if it has one
	pays  bool  // the last mail came within the limit
}

// A worker spins for a quarter of what its last batch took, within these.
const (
	leastSpin = 50 * time.Microsecond // the way of a request through client and broker
	mostSpin  = time.Millisecond
)

// until spins until ready, or until it is time to park, or latest: then false.
func (s *spin) until(ready func() bool, latest int64) bool {
	now := shm.Now()
	if s.since == 0 {
		s.since = now
	}
	if !s.pays {
		return false
	}
	for end := min(s.since+s.limit, latest); now < end; now = shm.Now() {
		if ready() {
			return true
		}
		yield()
	}
	return false
}

// mailed tells that a mail is there.
func (s *spin) mailed() {
	if s.since != 0 {
		s.pays = shm.Now()-s.since < s.limit
		s.since = 0
	}
}

// ran tells how long a batch took.
func (s *spin) ran(nanos int64) {
	s.limit = min(max(nanos/4, int64(leastSpin)), int64(mostSpin))
}

// yield lets another thread of any process have the core, if one waits for it.
func yield() { _, _, _ = unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0) }
