// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"math"
	"os"
	"runtime"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/shm"
)

// fitProcs gives this process as many Ps as it keeps busy, and one more, until
// ctx ends. Whenever a goroutine becomes ready while a P is idle, the scheduler
// wakes a thread for it. The goroutines of one call follow one another, so such a
// thread mostly finds nothing and sleeps again: with many idle Ps that is half
// of what a small call costs. Of a large one it is little, and its long system
// calls keep the Ps from others: then all Ps stay.
func fitProcs(ctx context.Context) {
	most := runtime.GOMAXPROCS(0)
	if os.Getenv("GOMAXPROCS") != "" || most <= leastProcs { // somebody has chosen, or there is nothing to choose
		return
	}
	moved, err := os.Open("/proc/self/io")
	if err != nil { // a kernel that does not count it
		return
	}
	defer moved.Close()
	fit := procs{most: most, now: leastProcs}
	runtime.GOMAXPROCS(fit.now)
	defer runtime.GOMAXPROCS(most)
	tick := time.NewTicker(procsTick)
	defer tick.Stop()
	for then := used(moved); ; {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		now := used(moved)
		before := fit.now
		if fit.used(now.since(then)); fit.now != before {
			runtime.GOMAXPROCS(fit.now)
		}
		then = now
	}
}

const (
	leastProcs = 4
	procsTick  = 50 * time.Millisecond
	calmTicks  = 20       // before there are fewer
	largeBytes = 16 << 10 // in the mean of a read or write
)

// procs decides how many Ps there are.
type procs struct {
	most, now int
	calm      int // ticks for which fewer would have done
	enough    int // most that were needed in those
}

// used tells how many cores were busy since the last tick, and how much the
// mean system call read or wrote.
func (p *procs) used(cores, bytes float64) {
	need := min(max(int(math.Ceil(cores*1.25))+1, leastProcs), p.most)
	if bytes >= largeBytes {
		need = p.most
	}
	if need >= p.now {
		p.now, p.calm, p.enough = need, 0, 0
		return
	}
	p.enough = max(p.enough, need)
	if p.calm++; p.calm >= calmTicks {
		p.now, p.calm, p.enough = p.enough, 0, 0
	}
}

// usage is what this process has used so far.
type usage struct {
	at           time.Time
	busy         time.Duration // CPU time, and that of Ps that sleeping threads hold
	bytes, calls int64         // read and written
}

func used(moved *os.File) usage {
	var r unix.Rusage
	_ = unix.Getrusage(unix.RUSAGE_SELF, &r)
	u := usage{at: time.Now(), busy: time.Duration(r.Utime.Nano()+r.Stime.Nano()) + shm.HeldTime()}
	var text [512]byte
	n, _ := moved.ReadAt(text[:], 0)
	var in, out, reads, writes int64
	_, _ = fmt.Sscanf(string(text[:n]), "rchar: %d\nwchar: %d\nsyscr: %d\nsyscw: %d", &in, &out, &reads, &writes)
	u.bytes, u.calls = in+out, reads+writes
	return u
}

func (u usage) since(then usage) (cores, bytes float64) {
	return float64(u.busy-then.busy) / float64(u.at.Sub(then.at)), float64(u.bytes-then.bytes) / float64(max(u.calls-then.calls, 1))
}
