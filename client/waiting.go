// SPDX-License-Identifier: Apache-2.0

package client

import (
	"context"
	"iter"
	"math/bits"
	"runtime"
	"sync/atomic"
	"time"

	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
)

// waiting lets many goroutines wait on one OS thread. The bell of a window is one futex
// word, and a goroutine that parks on it occupies a thread. So one of the goroutines
// that wait on a client is the leader and parks on the bell; the others follow on
// channels. When the leader's request has ended, it hands the lead to a follower. A
// single waiter is the leader: one futex call wakes it, without another goroutine.
type waiting struct {
	leading bool            // under link.mu
	others  int             // looks during which other goroutines of this client may be ready; the leader's
	parker  shm.Parker      // the leader's
	follow  []uint64        // bitmap of slots with a follower, under link.mu
	count   int             // bits set in follow
	wake    []chan struct{} // by slot, made on first use
	parked  atomic.Uint64   // odd while the leader is parked; +1 at each change
}

func (w *waiting) init(n int) {
	w.follow = make([]uint64, (n+63)/64)
	w.wake = make([]chan struct{}, n)
}

// await blocks until the request in slot i has ended or has an awaited part, or ctx ends, or Now reaches until
// (0 is never), in which case the error is ErrTimeout.
func (l *link) await(ctx context.Context, i uint32, until int64) error {
	for !l.isReady(i) {
		l.mu.Lock()
		if !l.wait.leading {
			l.wait.leading = true
			l.mu.Unlock()
			return l.lead(ctx, i, until)
		}
		wake := l.wait.wake[i]
		if wake == nil {
			wake = make(chan struct{}, 1)
			l.wait.wake[i] = wake
		}
		l.wait.follow[i/64] |= 1 << (i % 64)
		l.wait.count++
		if l.isReady(i) { // the leader may have looked before this follower was listed
			l.wakeFollower(i)
		}
		l.mu.Unlock()
		var over <-chan time.Time
		var timer *time.Timer
		if by := earlier(until, l.slots[i].ends); by != 0 {
			timer = time.NewTimer(time.Duration(by - shm.Now()))
			over = timer.C
		}
		var err error
		woken := false
		select {
		case <-wake:
			woken = true
		case <-ctx.Done():
			err = ctx.Err()
		case <-over:
			if until != 0 && shm.Now() >= until {
				err = status.ErrTimeout
			}
		}
		if timer != nil {
			timer.Stop()
		}
		l.mu.Lock()
		if l.wait.follow[i/64]&(1<<(i%64)) != 0 { // still on the list
			l.unfollow(i)
		} else if !woken {
			<-wake // a wake-up is on its way: leave the channel empty, or the next wake-up blocks under mu
		}
		ended := l.isReady(i)
		if err != nil || ended {
			l.promote() // the wake-up may have been for the lead: pass it on
		}
		l.mu.Unlock()
		if err != nil && !ended {
			return err
		}
	}
	return nil
}

// earlier is the earlier of two times; 0 is no time.
func earlier(a, b int64) int64 {
	if a == 0 || b != 0 && b < a {
		return b
	}
	return a
}

func (l *link) unfollow(i uint32) {
	l.wait.follow[i/64] &^= 1 << (i % 64)
	l.wait.count--
}

// parkSlice is how long a leader parks before it looks at the board again. Any attached
// process can steal a wake-up: it can read the board, so it can requeue the board's
// futexes. A stolen wake-up delays an answer by at most this time.
const parkSlice = 50 * time.Millisecond

// lead parks on the bell until the leader's request is ready.
//
// In test/model: Look, then FUTEX_WAIT.
func (l *link) lead(ctx context.Context, i uint32, until int64) error {
	defer l.resign()
	if ctx.Done() != nil {
		stop := context.AfterFunc(ctx, l.kick)
		defer stop()
	}
	by := earlier(until, l.slots[i].ends)
	for {
		seen := l.bell.Count.Load()
		l.wakeEnded()
		if l.isReady(i) {
			return nil
		}
		if l.wait.others > 0 {
			if letOthersRun(); l.isReady(i) {
				continue
			}
		}
		l.wait.parked.Add(1)
		// The leader sets parked, then checks ctx and dead. Another goroutine changes
		// ctx or dead, then kick reads parked. So one of them sees the other.
		now, slice := shm.Now(), parkSlice
		if by != 0 {
			slice = min(slice, time.Duration(by-now))
		}
		if ctx.Err() == nil && !l.dead.Load() {
			l.wait.parker.Single = l.wait.others == 0
			l.bell.Wait(&l.wait.parker, seen, slice)
			l.woke.Store(shm.Now())
		}
		l.wait.parked.Add(1)
		if err := ctx.Err(); err != nil && !l.isReady(i) {
			return err
		}
		if until != 0 && now >= until && !l.isReady(i) {
			return status.ErrTimeout
		}
	}
}

// letOthersRun yields to goroutines that are ready, before the leader parks a thread and
// perhaps a P. In a busy process the answer has often come by then, without a wake-up.
func letOthersRun() {
	for range mostYields {
		start := shm.Now()
		runtime.Gosched()
		if shm.Now()-start < int64(nobodyRan) {
			return
		}
	}
}

const (
	mostYields = 16
	nobodyRan  = time.Microsecond // a shorter yield found no goroutine ready

	// Goroutines that woke together with the leader have not run yet when it waits
	// again: at that moment it has no follower, but others are there.
	othersFor = 16 // looks after the last look with a follower
)

// resign hands the lead to a follower.
func (l *link) resign() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.wait.leading = false
	l.promote()
}

// kick makes a parked leader look again. A futex wake before the futex wait is lost, so
// kick repeats it until the leader has moved.
func (l *link) kick() {
	for p := l.wait.parked.Load(); p%2 == 1 && l.wait.parked.Load() == p; {
		l.bell.Wake()
		time.Sleep(20 * time.Microsecond)
	}
}

// wakeEnded wakes the followers whose requests are ready. Only a leader calls it.
func (l *link) wakeEnded() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.wait.count == 0 {
		l.wait.others = max(0, l.wait.others-1)
		return
	}
	l.wait.others = othersFor
	for i := range l.wait.followers() {
		if l.board.Word(l.first+i).Generation() == l.gens[i] || l.hasPart(i) {
			l.wakeFollower(i)
		}
	}
}

// wakeFollowers wakes all followers: the link is dead.
func (l *link) wakeFollowers() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i := range l.wait.followers() {
		l.wakeFollower(i)
	}
}

// promote makes a follower try for the lead, if there is no leader. The caller holds mu.
func (l *link) promote() {
	if l.wait.leading {
		return
	}
	for i := range l.wait.followers() {
		l.wakeFollower(i)
		return
	}
}

// followers are the slots with a follower. The caller holds mu, and may wake them.
func (w *waiting) followers() iter.Seq[uint32] {
	return func(yield func(uint32) bool) {
		for at, word := range w.follow {
			for ; word != 0; word &= word - 1 {
				if !yield(uint32(at*64 + bits.TrailingZeros64(word))) {
					return
				}
			}
		}
	}
}

// wakeFollower takes the follower of slot i off the list and wakes it. The caller holds mu.
func (l *link) wakeFollower(i uint32) {
	l.unfollow(i)
	l.wait.wake[i] <- struct{}{}
}
