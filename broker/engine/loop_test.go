// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"errors"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/shm"
)

// A loop that spins before it parks must not miss an event, a post, or the time.
func TestALoopThatSpinsSeesEventsPostsAndTime(t *testing.T) {
	l, err := newPoller()
	must.Do(t, err)
	defer l.Close()
	bell, err := shm.NewDoorbell()
	must.Do(t, err)
	defer bell.Close()
	fired := 0
	_, err = l.watchFD(int(bell), func() { fired++ })
	must.Do(t, err)
	// After short waits it spins, after long ones it does not.
	for i, wait := range []time.Duration{0, 0, 5 * time.Millisecond, 0, 0, 5 * time.Millisecond} {
		before, until := fired, shm.Now()+int64(time.Minute)
		if wait == 0 {
			bell.Ring()
		} else {
			until = shm.Now() + int64(wait)
		}
		for fired == before && shm.Now() < until { // a wait may end early
			must.Do(t, l.waitForEvents(until, shm.Now()+int64(shm.LeastSpin), func() {}))
		}
		if saw := fired - before; saw != 1 && wait == 0 || saw != 0 && wait != 0 {
			t.Errorf("wait %d: %d events", i, saw)
		}
	}
	posted := false
	l.Post(func() { posted = true })
	for !posted {
		must.Do(t, l.waitForEvents(never, never, l.runPosts))
	}
}

func TestALoopThatWasClosedDoesNotRing(t *testing.T) {
	l, err := newPoller()
	must.Do(t, err)
	var p [2]int
	must.Do(t, unix.Pipe2(p[:], unix.O_CLOEXEC|unix.O_NONBLOCK))
	l.Close()
	// The pipe gets the doorbell's number.
	must.Do(t, unix.Dup3(p[1], int(l.wake), unix.O_CLOEXEC))
	l.Post(func() {})
	if n, err := unix.Read(p[0], make([]byte, 8)); n > 0 || !errors.Is(err, unix.EAGAIN) {
		t.Errorf("%d bytes in another file, %v", n, err)
	}
	for _, fd := range []int{p[0], p[1], int(l.wake)} {
		_ = unix.Close(fd)
	}
}
