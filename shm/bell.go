// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"errors"
	"math"
	"time"

	"golang.org/x/sys/unix"
)

// Ring adds one and wakes the waiter. It always makes the system call: the board is
// read-only to clients, so that a client cannot say whether it is parked. A call
// without a waiter costs about 0.2 µs, once per client and batch.
//
// In test/model: Ring.
func (b *Bell) Ring() {
	b.Count.Add(1)
	b.Wake()
}

// Wake wakes every waiter without ringing, so that a broken or malicious peer that also
// waits cannot swallow the wake-up.
func (b *Bell) Wake() { futexWakeUp(wordOf(&b.Count), math.MaxInt32) }

// Wait parks until the bell's count differs from seen, at most d and at most a slice. It
// may return early: the caller looks again.
func (b *Bell) Wait(p *Parker, seen uint32, d time.Duration) { p.futex(wordOf(&b.Count), seen, d) }

// Wait parks a worker until mail number next comes, its bell is poked, or d has passed.
// seen is the value of Bell before the worker looked for other reasons not to wait.
//
// In test/model: park.
func (m *Mailbox) Wait(p *Parker, seen uint32, next uint64, d time.Duration) {
	m.Parked.Swap(1) // a full barrier, as in Producer.Push
	// Store Parked, then load Tail; the broker stores Tail, then loads Parked: one side
	// sees the other. A Poke in between changes Bell.
	if m.Tail.Load() == next {
		p.futex(wordOf(&m.Bell), seen, d)
	}
	m.Parked.Store(0)
}

// Doorbell wakes the broker. Each peer has one: an eventfd that the broker watches in an
// epoll set. The kernel keeps its count, so no peer can damage another's doorbell.
type Doorbell int

// NewDoorbell makes an eventfd.
func NewDoorbell() (Doorbell, error) {
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	return Doorbell(fd), err
}

// Ring wakes the broker. EAGAIN means that a wake-up is pending already.
func (d Doorbell) Ring() {
	one := [8]byte{1}
	for {
		_, err := unix.Write(int(d), one[:])
		if !errors.Is(err, unix.EINTR) {
			return
		}
	}
}

// Close closes the eventfd.
func (d Doorbell) Close() { _ = unix.Close(int(d)) }
