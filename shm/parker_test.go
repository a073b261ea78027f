// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"runtime"
	"sync/atomic"
	"testing"
	"time"
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
	if took > 10*time.Second {
		t.Errorf("20 collections beside a sleep of 20 s took %v", took)
	}
}

func TestAParkerGoesPastTheSchedulerOnlyWhileSleepsAreShort(t *testing.T) {
	var p Parker
	for _, last := range []struct {
		slept time.Duration
		raw   bool
	}{{0, true}, {shortSleep, true}, {5 * time.Millisecond, false}, {10 * time.Microsecond, true}} {
		p.slept(last.slept)
		p.Sleep(time.Hour, func(raw bool, d time.Duration) {
			if raw != last.raw {
				t.Errorf("after a sleep of %v the next goes past the scheduler: %v, want %v", last.slept, raw, last.raw)
			}
			if raw && d > rawSlice {
				t.Errorf("a sleep past the scheduler may last %v", d)
			}
		})
	}
}
