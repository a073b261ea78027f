// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"math"
	"os"
	"runtime"
	"runtime/debug"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/shm"
)

// fitProcs sets GOMAXPROCS to the number of busy Ps and one more, until ctx ends. When a
// goroutine becomes ready while a P is idle, the scheduler wakes a thread for it. The
// goroutines of one call run one after the other, so that thread finds nothing to do:
// with many idle Ps this is half the cost of a small call. With large calls, whose
// long system calls occupy Ps, all Ps stay.
func fitProcs(ctx context.Context) {
	most := runtime.GOMAXPROCS(0)
	if os.Getenv("GOMAXPROCS") != "" || most <= leastProcs { // chosen by the user, or too few to choose
		return
	}
	moved, err := os.Open("/proc/self/io")
	if err != nil { // this kernel does not count it
		return
	}
	defer moved.Close()
	fit := procs{most: most, now: leastProcs}
	runtime.GOMAXPROCS(fit.now)
	defer runtime.GOMAXPROCS(most)
	tick := time.NewTicker(procsTick)
	defer tick.Stop()
	for then := readSpent(moved); ; {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		now := readSpent(moved)
		before := fit.now
		if fit.adjust(now.since(then)); fit.now != before {
			runtime.GOMAXPROCS(fit.now)
		}
		then = now
	}
}

const (
	leastProcs = 4
	procsTick  = 50 * time.Millisecond
	calmTicks  = 20       // with less need, before the number falls
	largeBytes = 16 << 10 // per read or write, on average
)

// procs decides the number of Ps.
type procs struct {
	most, now int
	calm      int // ticks during which fewer were needed
	enough    int // most Ps needed during these ticks
}

// adjust takes the number of busy cores since the last tick, and the mean bytes of a read
// or write.
func (p *procs) adjust(cores, bytes float64) {
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

// spent is the use of resources by this process so far.
type spent struct {
	at           time.Time
	busy         time.Duration // CPU time, and the time of Ps that sleeping threads hold
	bytes, calls int64         // read and written
}

func readSpent(moved *os.File) spent {
	var r unix.Rusage
	_ = unix.Getrusage(unix.RUSAGE_SELF, &r)
	u := spent{at: time.Now(), busy: time.Duration(r.Utime.Nano()+r.Stime.Nano()) + shm.HeldTime()}
	var text [512]byte
	n, _ := moved.ReadAt(text[:], 0)
	var in, out, reads, writes int64
	_, _ = fmt.Sscanf(string(text[:n]), "rchar: %d\nwchar: %d\nsyscr: %d\nsyscw: %d", &in, &out, &reads, &writes)
	u.bytes, u.calls = in+out, reads+writes
	return u
}

func (u spent) since(then spent) (cores, bytes float64) {
	return float64(u.busy-then.busy) / float64(u.at.Sub(then.at)), float64(u.bytes-then.bytes) / float64(max(u.calls-then.calls, 1))
}

// collectSeldom makes the garbage collector run less often while the heap is small. With
// all buffers in use it limits the heap to about its usual size.
func collectSeldom(buffers int64) {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(400)
	}
	if os.Getenv("GOMEMLIMIT") == "" {
		debug.SetMemoryLimit(128<<20 + 2*buffers)
	}
}
