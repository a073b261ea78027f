package client_test

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/internal/attach"
	"github.com/ringbatch/ringbatch/internal/control"
	"github.com/ringbatch/ringbatch/shm"
)

const futexRequeue = 3

// steal takes every wake-up of the board away until the test ends: it moves
// the one who waits on another's bell to its own, which nobody rings.
func (b *bench) steal(t *testing.T) {
	t.Helper()
	s, err := attach.Open(t.Context(), b.sock, b.mem, &control.Request{Op: control.OpClient, Model: "echo", Window: 1})
	if err != nil {
		t.Fatal(err)
	}
	stop, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		mine := unsafe.Pointer(&s.Board.Bell(s.Info.FirstSlot).Count)
		for {
			for slot := range uint32(128) { // the windows of this test are the ring's first
				if theirs := unsafe.Pointer(&s.Board.Bell(slot).Count); theirs != mine {
					_, _, _ = unix.Syscall6(unix.SYS_FUTEX, uintptr(theirs), futexRequeue, 0, 1000, uintptr(mine), 0)
				}
			}
			select {
			case <-stop:
				return
			case <-time.After(200 * time.Microsecond):
			}
		}
	}()
	t.Cleanup(func() {
		close(stop)
		<-ended
		s.Close()
	})
}

// A wake-up that is stolen from a reaper used to cost what was left of half a
// second, each time.
func TestAThiefOfWakeUpsDoesNotStopTheNotifier(t *testing.T) {
	b := start(t)
	close(b.gate)
	b.takes.Store(int64(3 * time.Millisecond)) // long enough for the thief
	c := b.dial(t)
	n, err := c.Notifier()
	if err != nil {
		t.Fatal(err)
	}
	b.steal(t)
	checkRobbed(t, func() {
		submit(t, c, 1)
		for _, id := range collect(t, n, 1) {
			if err := c.RequestByID(id).Release(); err != nil {
				t.Error(err)
			}
		}
	})
}

func TestAThiefOfWakeUpsDoesNotStopThoseWhoWaitBesideANotifier(t *testing.T) {
	b := start(t)
	close(b.gate)
	b.takes.Store(int64(3 * time.Millisecond))
	c := b.dial(t)
	if _, err := c.Notifier(); err != nil {
		t.Fatal(err)
	}
	b.steal(t)
	checkRobbed(t, func() {
		if _, err := c.Infer(context.Background(), []float32{1, 2, 3, 4}); err != nil {
			t.Error(err)
		}
	})
}

// checkRobbed times requests of a few milliseconds, after pauses of all
// lengths: the longer, the deeper a reaper may sleep. The median allows for
// what a busy machine does to some of them.
func checkRobbed(t *testing.T, request func()) {
	t.Helper()
	took := make([]time.Duration, 30)
	for i := range took {
		start := time.Now()
		request()
		took[i] = time.Since(start)
		time.Sleep(time.Millisecond << (i % 8))
	}
	slices.Sort(took)
	median, longest := took[len(took)/2], took[len(took)-1]
	t.Logf("median %v, longest %v", median, longest)
	if median > 60*time.Millisecond {
		t.Errorf("requests of 5 ms took %v", took)
	}
}

// A request that ends at its deadline is told by the broker: if that is
// stolen, the deadline and 100 ms still hold.
func TestAThiefOfWakeUpsDoesNotHideADeadline(t *testing.T) {
	b := start(t) // the worker never answers
	defer close(b.gate)
	c := b.dial(t)
	n, err := c.Notifier()
	if err != nil {
		t.Fatal(err)
	}
	b.steal(t)
	const patience = 200 * time.Millisecond
	took := make([]time.Duration, 5)
	for i := range took {
		start := time.Now()
		r, err := c.TryClaim(1)
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(r.Notify(), r.CommitUntil(shm.Now()+int64(patience))); err != nil {
			t.Fatal(err)
		}
		for _, id := range collect(t, n, 1) {
			q := c.RequestByID(id)
			if err := q.Poll(); !errors.Is(err, client.ErrExpired) {
				t.Error(err)
			}
			if err := q.Release(); err != nil {
				t.Error(err)
			}
		}
		took[i] = time.Since(start)
	}
	slices.Sort(took)
	if median := took[len(took)/2]; median < patience || median > patience+100*time.Millisecond {
		t.Errorf("ends were told after %v, their deadline was %v", took, patience)
	}
}
