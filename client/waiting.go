// SPDX-License-Identifier: Apache-2.0

package client

import (
	"context"
	"math/bits"
	"runtime"
	"sync/atomic"
	"time"

	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
)

// Waiting without a thread per waiter. The bell of a window is one futex
// word, and a parked goroutine costs an OS thread. So of all goroutines that
// wait on one client, one is the leader and parks on the bell; the others
// follow on channels. A leader whose own request has ended hands the lead to
// a follower. A single waiter is always the leader: its wake-up is one futex
// hop with no goroutine in between.
type waiting struct {
	yields  bool            // see WithYield
	leading bool            // under link.mu
	others  int             // looks for which other goroutines of this client are expected to be ready; the leader's
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

// await blocks until the request in slot i has ended, or ctx has, or it is
// until on Now's clock (never, if that is 0): then the error is ErrTimeout.
func (l *link) await(ctx context.Context, i uint32, until int64) error {
	for !l.ended(i) {
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
		l.mu.Unlock()
		if l.ended(i) { // who pokes may have looked before we were listed
			l.poke(i)
		}
		var over <-chan time.Time
		var timer *time.Timer
		if by := earlier(until, l.slots[i].ends); by != 0 {
			timer = time.NewTimer(time.Duration(by - shm.Now()))
			over = timer.C
		}
		var err error
		select {
		case <-wake:
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
		if l.wait.follow[i/64]&(1<<(i%64)) != 0 { // nobody took us off the list
			l.unfollow(i)
		} else if err != nil {
			<-wake // somebody is poking us: take it, so that the channel is empty for the next
		}
		ended := l.ended(i)
		if err != nil || ended {
			l.promote() // perhaps it was the lead that we were woken for: pass it on
		}
		l.mu.Unlock()
		if err != nil && !ended {
			return err
		}
	}
	return nil
}

// earlier is the earlier of two points in time, of which 0 is none.
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

// parkSlice is how long a leader parks before it looks at the board by itself. Any
// attached process can take a wake-up away: it may read the board, so it may
// requeue the board's futexes. A stolen wake-up costs at most this long.
const parkSlice = 50 * time.Millisecond

// lead parks on the bell until the leader's own request has ended.
//
// In docs/model: Look, then FUTEX_WAIT.
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
		if l.ended(i) {
			return nil
		}
		if l.wait.yields || l.wait.others > 0 {
			if letOthersRun(); l.ended(i) {
				continue
			}
		}
		l.wait.parked.Add(1)
		// Parked first, then look; kick has its cause visible first, then
		// looks at parked: one of us sees the other.
		now, slice := shm.Now(), parkSlice
		if by != 0 {
			slice = min(slice, time.Duration(by-now))
		}
		if ctx.Err() == nil && !l.dead.Load() {
			l.wait.parker.Single = !l.wait.yields && l.wait.others == 0
			l.bell.Wait(&l.wait.parker, seen, slice)
			l.woke.Store(shm.Now())
		}
		l.wait.parked.Add(1)
		if err := ctx.Err(); err != nil && !l.ended(i) {
			return err
		}
		if until != 0 && now >= until && !l.ended(i) {
			return status.ErrTimeout
		}
	}
}

// letOthersRun lets goroutines run that are ready, before the leader parks a
// thread and perhaps a P. In a busy process the answer has often come by then,
// and those of others with it, without any wake-up. A goroutine that waits alone
// parks at once: for it a yield is only dear.
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
	nobodyRan  = time.Microsecond // a yield that takes less than this found nobody who was ready

	// Those who were woken together with a leader have not run yet when it
	// waits again: nobody follows it at that moment, but others are there.
	othersFor = 16 // looks after the last one with a follower
)

// resign hands the lead on.
func (l *link) resign() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.wait.leading = false
	l.promote()
}

// kick makes a parked leader look around. A futex wake that comes before the
// wait is lost, hence the loop; it ends as soon as the leader has moved.
func (l *link) kick() {
	for p := l.wait.parked.Load(); p%2 == 1 && l.wait.parked.Load() == p; {
		l.bell.Wake()
		time.Sleep(20 * time.Microsecond)
	}
}

// wakeEnded pokes the followers whose requests have ended. Only a leader calls it.
func (l *link) wakeEnded() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.wait.count == 0 {
		l.wait.others = max(0, l.wait.others-1)
		return
	}
	l.wait.others = othersFor
	for w, word := range l.wait.follow {
		for ; word != 0; word &= word - 1 {
			i := uint32(w*64 + bits.TrailingZeros64(word))
			if l.board.Word(l.first+i).Generation() == l.gens[i] {
				l.unfollow(i)
				l.wait.wake[i] <- struct{}{}
			}
		}
	}
}

// wakeFollowers pokes all of them: the link is dead.
func (l *link) wakeFollowers() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for w, word := range l.wait.follow {
		for ; word != 0; word &= word - 1 {
			i := uint32(w*64 + bits.TrailingZeros64(word))
			l.unfollow(i)
			l.wait.wake[i] <- struct{}{}
		}
	}
}

func (l *link) poke(i uint32) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.wait.follow[i/64]&(1<<(i%64)) != 0 {
		l.unfollow(i)
		l.wait.wake[i] <- struct{}{}
	}
}

// promote makes some follower try for the lead, if there is no leader. The
// caller holds mu.
func (l *link) promote() {
	if l.wait.leading || l.wait.count == 0 {
		return
	}
	for w, word := range l.wait.follow {
		if word != 0 {
			i := uint32(w*64 + bits.TrailingZeros64(word))
			l.unfollow(i)
			l.wait.wake[i] <- struct{}{}
			return
		}
	}
}
