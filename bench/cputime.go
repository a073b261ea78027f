package main

import (
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// cpuTime is the CPU time, user and system, that a process has used so far:
// its CPU clock, which counts nanoseconds where /proc counts ticks.
func cpuTime(pid int) (time.Duration, error) {
	const schedClock = 2
	var ts unix.Timespec
	if err := unix.ClockGettime(int32(^pid)<<3|schedClock, &ts); err != nil {
		return 0, fmt.Errorf("CPU clock of process %d: %w", pid, err)
	}
	return time.Duration(ts.Nano()), nil
}

// cpuTimes adds up the CPU time of several processes.
func cpuTimes(procs []*proc) (sum time.Duration, err error) {
	for _, p := range procs {
		d, err := cpuTime(p.pid())
		if err != nil {
			return 0, err
		}
		sum += d
	}
	return sum, nil
}
