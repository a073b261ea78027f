// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"runtime"
	"sync/atomic"
	"time"
)

// Parker decides how a thread sleeps in the kernel.
//
// A sleep through the Go scheduler (Syscall6) of more than 20 µs costs two more thread
// switches: sysmon wakes to take the P away, and again when the sleep ends. Under dense
// traffic, with sleeps of microseconds, that costs as much as the sleep. A sleep past
// the scheduler (RawSyscall6) has no such cost, but it holds a P. So the Parker sleeps
// past the scheduler only if the last sleep was short.
//
// A stop of the world does not wait for such a sleep: it sends the thread a signal, and
// FUTEX_WAIT with a timeout and epoll return EINTR. (FUTEX_WAIT without a timeout would
// restart.)
//
// A Parker belongs to one sleeper at a time. The zero value is ready.
type Parker struct {
	// Polite means that other goroutines of the process have work to do: the Parker
	// never holds a P.
	Polite bool
	// Alone means that the process has little other work. While half of the Ps are
	// free, longer sleeps count as short.
	Alone bool
	// Single means that one goroutine waits; the process may have other work. As Alone,
	// while three quarters of the Ps are free.
	Single bool
	last   time.Duration // length of the last sleep
}

// sleepers is the number of threads of this process that sleep past the scheduler.
var sleepers atomic.Int32

const (
	shortSleep = 200 * time.Microsecond
	// Between requests from a network, or on busy cores, each sleep of a broker's loop
	// is longer than shortSleep.
	shortSleepAlone = 2 * time.Millisecond
	// rawSlice ends a sleep that was expected to be short. A shorter slice would cost
	// more: the kernel programs a timer that is due before its next tick into the
	// hardware, which takes some 3 µs on a virtual machine.
	rawSlice = 10 * time.Millisecond
)

// Sleep calls sleep once. If the last sleep was short, it sleeps past the scheduler, for
// at most rawSlice. It may return early: the caller looks for a reason to sleep on.
func (p *Parker) Sleep(d time.Duration, sleep func(raw bool, d time.Duration)) {
	start := Now()
	if p.goesPast() {
		sleepers.Add(1)
		sleep(true, min(d, rawSlice))
		sleepers.Add(-1)
	} else {
		sleep(false, d)
	}
	p.last = time.Duration(Now() - start)
}

// goesPast decides whether the next sleep goes past the scheduler.
func (p *Parker) goesPast() bool {
	switch {
	case p.Polite:
		return false
	case p.last <= shortSleep:
		return true
	case p.last > shortSleepAlone:
		return false
	case p.Alone:
		return oneIn(2)
	case p.Single:
		return oneIn(4)
	}
	return false
}

// oneIn reports whether, with one more sleeper, at most one in n Ps is held.
func oneIn(n int) bool { return n*(int(sleepers.Load())+1) <= runtime.GOMAXPROCS(0) }

// futex parks until word differs from seen, or d has passed.
func (p *Parker) futex(word *uint32, seen uint32, d time.Duration) {
	if d <= 0 {
		return
	}
	p.Sleep(min(d, waitSlice), func(raw bool, d time.Duration) { futexWaitFor(word, seen, d, raw) })
}
