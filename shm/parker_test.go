// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"math"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/internal/must"
)

// A sleep past the scheduler must not keep a stop of the world waiting: the
// signal that asks for it ends the sleep.
func TestASleepPastTheSchedulerDoesNotHoldUpGarbageCollection(t *testing.T) {
	var word uint32
	var stop atomic.Bool
	var sleeps atomic.Int64
	done := make(chan struct{})
	go func() {
		defer close(done)
		for !stop.Load() {
			futexWaitFor(&word, 0, 20*time.Second, true)
			sleeps.Add(1)
		}
	}()
	start := time.Now()
	for range 20 {
		time.Sleep(time.Millisecond) // let it fall asleep
		runtime.GC()
	}
	took := time.Since(start)
	stop.Store(true)
	for stopped := false; !stopped; {
		futexWakeOne(&word)
		select {
		case <-done:
			stopped = true
		case <-time.After(time.Millisecond):
		}
	}
	t.Logf("20 collections took %v; the sleep was ended %d times", took, sleeps.Load())
	if took > time.Minute { // each would wait for a whole sleep
		t.Errorf("20 collections beside a sleep of 20 s took %v", took)
	}
}

func TestAParkerGoesPastTheSchedulerOnlyWhileSleepsAreShort(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(2))
	for _, last := range []struct {
		alone bool
		slept time.Duration
		raw   bool
	}{
		{false, 0, true}, {false, shortSleep, true}, {false, shortSleepAlone, false}, {false, 5 * time.Millisecond, false},
		{true, 0, true}, {true, shortSleepAlone, true}, {true, 5 * time.Millisecond, false},
	} {
		p := Parker{Alone: last.alone, last: last.slept}
		p.Sleep(time.Hour, func(raw bool, d time.Duration) {
			if raw != last.raw {
				t.Errorf("after a sleep of %v (alone: %v) the next goes past the scheduler: %v, want %v", last.slept, last.alone, raw,
					last.raw)
			}
			if raw && d > rawSlice {
				t.Errorf("a sleep past the scheduler may last %v", d)
			}
		})
	}
}

func TestSleepsOfMillisecondsPastTheSchedulerLeaveHalfOfThePsToOthers(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(4))
	var sleep func(depth int)
	sleep = func(depth int) { // one inside the other: as many at once
		p := Parker{Alone: true, last: shortSleepAlone}
		p.Sleep(time.Hour, func(raw bool, _ time.Duration) {
			if want := depth < 2; raw != want {
				t.Errorf("beside %d sleepers another goes past the scheduler: %v, want %v", depth, raw, want)
			}
			if depth < 3 {
				sleep(depth + 1)
			}
		})
	}
	sleep(0)
	if n := sleepers.Load(); n != 0 {
		t.Errorf("%d sleep on", n)
	}
}

func TestAGoroutineThatWaitsAloneHoldsOneOfFourPsAtMost(t *testing.T) {
	for _, c := range []struct {
		ps    int
		slept time.Duration
		raw   bool
	}{{2, shortSleep, true}, {2, shortSleepAlone, false}, {4, shortSleepAlone, true}, {4, 5 * time.Millisecond, false}} {
		defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(c.ps))
		p := Parker{Single: true, last: c.slept}
		p.Sleep(time.Hour, func(raw bool, _ time.Duration) {
			if raw != c.raw {
				t.Errorf("with %d Ps, after a sleep of %v, the next goes past the scheduler: %v, want %v", c.ps, c.slept, raw, c.raw)
			}
		})
	}
}

func TestSpinsOnlyWhileWaitsAreShort(t *testing.T) {
	looked := 0
	comesAt := func(n int) func() bool {
		looked = 0
		return func() bool { looked++; return looked == n }
	}
	s := Spin{Limit: int64(time.Hour)} // so that "soon" does not hang on the machine's load
	if s.Until(comesAt(1), math.MaxInt64) || looked != 0 {
		t.Error("spins before it ever waited")
	}
	s.Over() // at once
	if !s.pays {
		t.Error("it came at once, and spinning does not pay")
	}
	for s.rest = 1; s.rest != 0; { // again if another thread took the core meanwhile
		s.rest = 0
		if came := s.Until(comesAt(3), math.MaxInt64); s.rest == 0 && (!came || looked != 3) {
			t.Errorf("looked %d times for what was there at the third", looked)
		}
	}
	s.Over()
	s.Limit = int64(time.Millisecond)
	if s.Until(comesAt(-1), math.MaxInt64) {
		t.Error("it came from nowhere")
	}
	s.Over() // too late
	if s.Until(comesAt(1), math.MaxInt64) {
		t.Error("spins although the last wait was long")
	}
}

func TestASpinEndsWithTheCallersTime(t *testing.T) {
	s := Spin{Limit: int64(time.Hour), pays: true}
	if s.Until(func() bool { return false }, Now()+int64(time.Millisecond)) {
		t.Error("it came from nowhere")
	}
}

func TestAnewRestartsTheWait(t *testing.T) {
	s := Spin{Limit: int64(time.Minute), since: Now() - int64(time.Hour)}
	s.Anew(Now())
	s.Over()
	if !s.pays {
		t.Error("it came right after, and spinning does not pay")
	}
}

func TestNowIsTheKernelsMonotonicClock(t *testing.T) {
	var ts unix.Timespec
	must.Do(t, unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts))
	if d := time.Duration(Now() - ts.Nano()); d < -time.Millisecond || d > time.Minute {
		t.Errorf("Now is %v after the kernel's clock", d)
	}
}

// The kernel refuses to populate from an address inside one of its pages.
func TestRangesAreWidenedToThePagesOfTheKernel(t *testing.T) {
	for _, c := range []struct {
		r                    Range
		page, size, from, to int64
	}{
		{Range{5000, 10}, 4096, 1 << 20, 4096, 8192},
		{Range{5000, 10}, 65536, 1 << 20, 0, 65536},
		{Range{65536 + 4096, 65536}, 65536, 1 << 20, 65536, 3 * 65536},
		{Range{65536 + 4096, 4096}, 65536, 65536 + 8192, 65536, 65536 + 8192}, // a segment ends inside a page
	} {
		if from, to := wholePages(c.r, c.page, c.size); from != c.from || to != c.to {
			t.Errorf("%+v in pages of %d: %d..%d", c.r, c.page, from, to)
		}
	}
}
