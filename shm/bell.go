// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"errors"
	"math"
	"time"

	"golang.org/x/sys/unix"
)

// Ring adds one and wakes the waiter. It always makes the system call: a
// client's board is read-only to it, so it cannot say whether it is parked;
// a call that finds nobody costs about 0.2 µs once per client and batch.
//
// In docs/model: Ring.
func (b *Bell) Ring() {
	b.Count.Add(1)
	b.Wake()
}

// Wake wakes every waiter without ringing, so that a broken or malicious peer that
// waits there, too, cannot swallow the wake-up.
func (b *Bell) Wake() { futexWakeUp(wordOf(&b.Count), math.MaxInt32) }

// Wait parks until the bell's count is no longer seen, at most d and at most
// a slice; the caller looks again in any case.
func (b *Bell) Wait(p *Parker, seen uint32, d time.Duration) { p.futex(wordOf(&b.Count), seen, d) }

// Wait parks a worker until a mail comes, its bell is poked, or d has passed.
// next is the number of the mail it is waiting for; seen is Bell as it was
// before the worker looked for other reasons not to wait.
//
// In docs/model: park.
func (m *Mailbox) Wait(p *Parker, seen uint32, next uint64, d time.Duration) {
	m.Parked.Swap(1) // a full barrier, as in Producer.Push
	// Store Parked, then load Tail; the broker stores Tail, then loads
	// Parked: one of us sees the other. A Poke in between changes Bell.
	if m.Tail.Load() == next {
		p.futex(wordOf(&m.Bell), seen, d)
	}
	m.Parked.Store(0)
}

// Doorbell is how peers wake the broker: an eventfd of their own, which the
// broker watches with all others in one epoll set. The kernel keeps its
// count, so no peer can damage another's.
type Doorbell int

// NewDoorbell makes an eventfd.
func NewDoorbell() (Doorbell, error) {
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	return Doorbell(fd), err
}

// Ring wakes the broker. EAGAIN means that it is being woken already.
func (d Doorbell) Ring() {
	one := [8]byte{1}
	for {
		_, err := unix.Write(int(d), one[:])
		if !errors.Is(err, unix.EINTR) {
			return
		}
	}
}

// Close closes it.
func (d Doorbell) Close() { _ = unix.Close(int(d)) }
