// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"errors"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/shm"
)

// A loop that spins before it parks must miss nothing that one that parks at
// once sees: an event, a post, the time.
func TestALoopThatSpinsSeesEventsPostsAndTime(t *testing.T) {
	l, err := newPoller()
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	bell, err := shm.NewDoorbell()
	if err != nil {
		t.Fatal(err)
	}
	defer bell.Close()
	fired := 0
	if _, err := l.watchFD(int(bell), func() { fired++ }); err != nil {
		t.Fatal(err)
	}
	// In turns after short waits, after which it spins, and long ones, after
	// which it does not.
	for i, wait := range []time.Duration{0, 0, 5 * time.Millisecond, 0, 0, 5 * time.Millisecond} {
		before, until := fired, shm.Now()+int64(time.Minute)
		if wait == 0 {
			bell.Ring()
		} else {
			until = shm.Now() + int64(wait)
		}
		for fired == before && shm.Now() < until { // a wait may end early
			if err := l.waitForEvents(until, shm.Now()+int64(shm.LeastSpin), func() {}); err != nil {
				t.Fatal(err)
			}
		}
		if saw := fired - before; saw != 1 && wait == 0 || saw != 0 && wait != 0 {
			t.Errorf("wait %d: %d events", i, saw)
		}
	}
	posted := false
	l.Post(func() { posted = true })
	for !posted {
		if err := l.waitForEvents(never, never, l.runPosts); err != nil {
			t.Fatal(err)
		}
	}
}

func TestALoopThatWasClosedRingsNobody(t *testing.T) {
	l, err := newPoller()
	if err != nil {
		t.Fatal(err)
	}
	var p [2]int
	if err := unix.Pipe2(p[:], unix.O_CLOEXEC|unix.O_NONBLOCK); err != nil {
		t.Fatal(err)
	}
	l.Close()
	// The pipe gets the number that the doorbell had.
	if err := unix.Dup3(p[1], int(l.wake), unix.O_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	l.Post(func() {})
	if n, err := unix.Read(p[0], make([]byte, 8)); n > 0 || !errors.Is(err, unix.EAGAIN) {
		t.Errorf("%d bytes in a descriptor of somebody else, %v", n, err)
	}
	for _, fd := range []int{p[0], p[1], int(l.wake)} {
		_ = unix.Close(fd)
	}
}
