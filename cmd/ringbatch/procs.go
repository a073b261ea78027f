// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"math"
	"os"
	"runtime"
	"time"

	"golang.org/x/sys/unix"
)

// fitProcs gives this process as many Ps as it keeps busy, and one more, until
// ctx ends. Whenever a goroutine becomes ready while a P is idle, the scheduler
// wakes a thread for it. The goroutines of one call follow one another, so such a
// thread mostly finds nothing and sleeps again: with many idle Ps that is half
// of what a call costs.
func fitProcs(ctx context.Context) {
	most := runtime.GOMAXPROCS(0)
	if os.Getenv("GOMAXPROCS") != "" || most <= leastProcs { // somebody has chosen, or there is nothing to choose
		return
	}
	fit := procs{most: most, now: leastProcs}
	runtime.GOMAXPROCS(fit.now)
	defer runtime.GOMAXPROCS(most)
	tick := time.NewTicker(procsTick)
	defer tick.Stop()
	for then, used := time.Now(), cpuTime(); ; {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		now, uses := time.Now(), cpuTime()
		before := fit.now
		if fit.busy(float64(uses-used) / float64(now.Sub(then))); fit.now != before {
			runtime.GOMAXPROCS(fit.now)
		}
		then, used = now, uses
	}
}

const (
	leastProcs = 2
	procsTick  = 50 * time.Millisecond
	calmTicks  = 20 // before there are fewer
)

// procs decides how many Ps there are.
type procs struct {
	most, now int
	calm      int // ticks for which fewer would have done
	enough    int // most that were needed in those
}

// busy tells how many cores were busy since the last tick.
func (p *procs) busy(cores float64) {
	need := min(max(int(math.Ceil(cores*1.25))+1, leastProcs), p.most)
	if need >= p.now {
		p.now, p.calm, p.enough = need, 0, 0
		return
	}
	p.enough = max(p.enough, need)
	if p.calm++; p.calm >= calmTicks {
		p.now, p.calm, p.enough = p.enough, 0, 0
	}
}

// cpuTime is what this process has used so far.
func cpuTime() time.Duration {
	var u unix.Rusage
	_ = unix.Getrusage(unix.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
