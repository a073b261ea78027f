// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"runtime"
	"sync/atomic"
	"time"
)

// Parker decides how a thread sleeps in the kernel.
//
// The Go way (Syscall6) tells the scheduler; but a sleep of more than 20 µs
// then costs two more thread switches: sysmon wakes to take the P away, and
// is woken again when the sleep ends. Under dense traffic, where sleeps last
// microseconds, that is as much as the sleep itself. Sleeping past the
// scheduler's back (RawSyscall6) has no such cost, but holds a P. So it is
// done only while sleeps are short, as the last one tells.
//
// A stop of the world does not have to wait for such a sleep: it sends the
// thread a signal, and both FUTEX_WAIT with a timeout and epoll return EINTR
// then (without a timeout FUTEX_WAIT would be restarted).
//
// A Parker belongs to one sleeper at a time. The zero value is ready.
type Parker struct {
	// Polite is set where other goroutines of the process have work to do
	// meanwhile: then it never holds a P.
	Polite bool
	// Alone is set where the process has little else to do than what the
	// sleeper waits for. Then longer sleeps count as short, while half of
	// the Ps are free.
	Alone bool
	// Single is set where one goroutine waits, as far as the sleeper knows; the
	// process may have other work. As Alone, while three quarters are free.
	Single bool
	last   time.Duration // how long the last sleep was
}

// sleepers is how many threads of this process sleep past the scheduler now.
var sleepers atomic.Int32

// held adds up, in nanoseconds, how long they slept.
var held atomic.Int64

// HeldTime is how long Ps of this process were held by threads that slept, all
// of them together.
func HeldTime() time.Duration { return time.Duration(held.Load()) }

const (
	shortSleep = 200 * time.Microsecond
	// Between the requests of a network, or on cores that have other things to
	// do, a broker's loop sleeps for longer than shortSleep, each time.
	shortSleepAlone = 2 * time.Millisecond
	// rawSlice ends a sleep that was expected to be short. Not sooner: a
	// timer that is due before the kernel's next tick has to be programmed
	// into the hardware, which costs some 3 µs on a virtual machine.
	rawSlice = 10 * time.Millisecond
)

// Sleep calls sleep once: past the scheduler, for rawSlice at most, if the
// sleep before was short; otherwise with it. It may return early; the caller
// looks whether there is a reason to sleep on.
func (p *Parker) Sleep(d time.Duration, sleep func(raw bool, d time.Duration)) {
	start := Now()
	if p.goesPast() {
		sleepers.Add(1)
		sleep(true, min(d, rawSlice))
		sleepers.Add(-1)
		held.Add(Now() - start)
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
		return leaves(2)
	case p.Single:
		return leaves(4)
	}
	return false
}

// leaves tells whether all but one in n of the Ps are free if one more thread sleeps past the scheduler.
func leaves(n int) bool { return n*(int(sleepers.Load())+1) <= runtime.GOMAXPROCS(0) }

// futex parks until word is no longer seen, or d has passed.
func (p *Parker) futex(word *uint32, seen uint32, d time.Duration) {
	if d <= 0 {
		return
	}
	p.Sleep(min(d, waitSlice), func(raw bool, d time.Duration) { futexWaitFor(word, seen, d, raw) })
}
