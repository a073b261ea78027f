// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/internal/cputime"
)

// Usage is a process's resources that must not leak.
type Usage struct {
	FDs     int // without pipes, epolls and pidfds of children, which Go's runtime opens by itself
	Maps    int // mappings of our shared memory
	Threads int
	RSS     int64 // bytes
	Peak    int64 // the most RSS ever
}

// UsageOf reads /proc.
func UsageOf(pid int) (u Usage, err error) {
	fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		return u, err
	}
	for _, e := range fds {
		to, _ := os.Readlink(fmt.Sprintf("/proc/%d/fd/%s", pid, e.Name()))
		switch {
		case to == "", strings.HasPrefix(to, "pipe:"), strings.Contains(to, "eventpoll"):
		case pid == os.Getpid() && strings.Contains(to, "pidfd"):
		default:
			u.FDs++
		}
	}
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
	if err != nil {
		return u, err
	}
	u.Maps = strings.Count(string(maps), "memfd:ringbatch-")
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return u, err
	}
	for line := range strings.Lines(string(status)) {
		_, _ = fmt.Sscanf(line, "Threads: %d", &u.Threads)
		if n, _ := fmt.Sscanf(line, "VmRSS: %d kB", &u.RSS); n == 1 {
			u.RSS <<= 10
		}
		if n, _ := fmt.Sscanf(line, "VmHWM: %d kB", &u.Peak); n == 1 {
			u.Peak <<= 10
		}
	}
	return u, nil
}

// spareThreads is how many idle threads the Go runtime may keep.
const spareThreads = 24

// Within returns an error if the process has more than before.
func (u Usage) Within(before Usage) error {
	if u.FDs > before.FDs || u.Maps > before.Maps || u.Threads > before.Threads+spareThreads {
		return fmt.Errorf("%d descriptors, %d mappings, %d threads; %d, %d and %d before",
			u.FDs, u.Maps, u.Threads, before.FDs, before.Maps, before.Threads)
	}
	return nil
}

// WithWorkers adds a broker's resources for n workers.
func (u Usage) WithWorkers(n int) Usage {
	u.FDs += 3 * n // connection, pidfd, doorbell
	u.Maps += n    // its session
	return u
}

// Children are the running child processes of this process.
func Children() (pids []int, err error) {
	files, err := filepath.Glob("/proc/self/task/*/children")
	if err != nil {
		return nil, err
	}
	for _, file := range files {
		text, _ := os.ReadFile(file) // a thread may have ended
		for _, pid := range strings.Fields(string(text)) {
			n, err := strconv.Atoi(pid)
			if err != nil {
				return nil, err
			}
			pids = append(pids, n)
		}
	}
	return pids, nil
}

// CPUTime is the CPU time so far of this process, of its ended children and of the
// bed's processes.
func (b *Bed) CPUTime() (sum time.Duration) {
	for _, who := range []int{unix.RUSAGE_SELF, unix.RUSAGE_CHILDREN} {
		var u unix.Rusage
		if unix.Getrusage(who, &u) == nil {
			sum += time.Duration(u.Utime.Nano() + u.Stime.Nano())
		}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, p := range b.processes {
		if p.Running() {
			d, _ := cputime.Of(p.Pid()) // it may have ended just now
			sum += d
		}
	}
	return sum
}
