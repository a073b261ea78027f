// SPDX-License-Identifier: Apache-2.0

package client_test

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/internal/attach"
	"github.com/ringbatch/ringbatch/internal/control"
	"github.com/ringbatch/ringbatch/worker"
)

const futexRequeue = 3

// steal takes every wake-up of the board away until the test ends: it moves
// the one who waits on another's bell to its own, which nobody rings.
func (r *ring) steal(t *testing.T) {
	t.Helper()
	s, err := attach.Open(t.Context(), r.socket, r.mem, &control.Request{Op: control.OpClient, Model: "m", Window: 1})
	if err != nil {
		t.Fatal(err)
	}
	stop, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		mine := unsafe.Pointer(&s.Board.Bell(s.Info.FirstSlot).Count)
		for {
			for slot := range uint32(32) { // plain has so many
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

// A wake-up that is stolen costs up to 50 ms. Requests of a few milliseconds are timed, after pauses of all lengths.
// The median allows for what a busy machine does to some of them; where it does
// that to most of them, they are timed again.
func TestAThiefOfWakeUpsDoesNotStopThoseWhoWait(t *testing.T) {
	r := newRing(t, plain(t))
	r.work(func(ctx context.Context, b *worker.Batch) error {
		time.Sleep(3 * time.Millisecond) // long enough for the thief
		return double(ctx, b)
	})
	c := r.dial(client.WithWindow(8))
	r.steal(t)
	took := make([]time.Duration, 30)
	eventually(t, func() error {
		for i := range took {
			start := time.Now()
			if _, err := c.Infer(context.Background(), []float32{1, 2, 3, 4}); err != nil {
				t.Error(err)
			}
			took[i] = time.Since(start)
			time.Sleep(time.Millisecond << (i % 8))
		}
		slices.Sort(took)
		median, longest := took[len(took)/2], took[len(took)-1]
		t.Logf("median %v, longest %v", median, longest)
		if median > 150*time.Millisecond {
			return fmt.Errorf("requests of 5 ms took %v", took)
		}
		return nil
	})
}

// A request that ends at its deadline is told by the broker: if that is
// stolen, the deadline and 100 ms still hold.
func TestAThiefOfWakeUpsDoesNotHideADeadline(t *testing.T) {
	r, _ := gated(t) // the worker never answers
	c := r.dial(client.WithWindow(8))
	r.steal(t)
	const limit = 200 * time.Millisecond
	took := make([]time.Duration, 5)
	eventually(t, func() error {
		for i := range took {
			q, err := c.Claim(soon(t), 1)
			expect(t, "claim", err, nil)
			start := time.Now()
			ctx, cancel := context.WithTimeout(context.Background(), limit)
			expect(t, "commit", q.Commit(ctx), nil)
			cancel()
			expect(t, "wait", q.Wait(context.Background()), client.ErrExpired)
			took[i] = time.Since(start)
			expect(t, "release", q.Release(), nil)
		}
		slices.Sort(took)
		if took[0] < limit {
			t.Errorf("ends were told after %v, before their deadline of %v", took, limit)
		}
		if median := took[len(took)/2]; median > limit+100*time.Millisecond {
			return fmt.Errorf("ends were told after %v, their deadline was %v", took, limit)
		}
		return nil
	})
}
