package shm

import (
	"time"

	"golang.org/x/sys/unix"
)

// Parker decides how a thread sleeps in the kernel.
//
// The Go way (Syscall6) tells the scheduler; but a sleep of more than 20 µs
// then costs two more thread switches: sysmon wakes to take the P away, and
// is woken again when the sleep ends. Under dense traffic, where sleeps last
// microseconds, that is as much as the sleep itself. Sleeping past the
// scheduler's back (RawSyscall6) has no such cost, but holds a P and delays a
// stop of the world, so it is cut off after rawSlice; and because a cut-off
// sleep costs a wake-up of its own, it is tried only while sleeps are short.
//
// A Parker belongs to one sleeper at a time. The zero value is ready.
type Parker struct{ long bool }

// rawSlice bounds how long a garbage collection can be kept waiting.
const rawSlice = 200 * time.Microsecond

// Sleep calls sleep once or twice: past the scheduler for rawSlice at most,
// then, if nothing happened, with it, for the rest of d. sleep reports
// whether it ended for another reason than time.
func (p *Parker) Sleep(d time.Duration, sleep func(raw bool, d time.Duration) (woken bool)) {
	if !p.long {
		if sleep(true, min(d, rawSlice)) || d <= rawSlice {
			return
		}
		p.long = true
		d -= rawSlice
	}
	start := Now()
	sleep(false, d)
	p.long = time.Duration(Now()-start) > rawSlice
}

// futex parks until word is no longer seen, or d has passed.
func (p *Parker) futex(word *uint32, seen uint32, d time.Duration) {
	if d <= 0 {
		return
	}
	p.Sleep(min(d, waitSlice), func(raw bool, d time.Duration) bool {
		return futexWaitFor(word, seen, d, raw) != unix.ETIMEDOUT
	})
}
