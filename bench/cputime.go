package main

import (
	"bufio"
	"fmt"
	"os"
	"strconv"
	"strings"
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

// machineTime is the CPU time that everything on this machine has used so
// far, what a hypervisor took from it included. It counts in ticks.
func machineTime() (time.Duration, error) {
	f, err := os.Open("/proc/stat")
	if err != nil {
		return 0, err
	}
	defer f.Close()
	line, err := bufio.NewReader(f).ReadString('\n')
	if err != nil {
		return 0, fmt.Errorf("read /proc/stat: %w", err)
	}
	return parseMachineTime(line)
}

// parseMachineTime reads: cpu user nice system idle iowait irq softirq steal …
func parseMachineTime(line string) (time.Duration, error) {
	const idle, iowait, steal = 4, 5, 8
	fields := strings.Fields(line)
	if len(fields) <= steal || fields[0] != "cpu" {
		return 0, fmt.Errorf("unexpected first line of /proc/stat: %q", line)
	}
	var ticks int64
	for i, f := range fields[1 : steal+1] {
		n, err := strconv.ParseInt(f, 10, 64)
		if err != nil {
			return 0, fmt.Errorf("read /proc/stat: %w", err)
		}
		if i+1 != idle && i+1 != iowait {
			ticks += n
		}
	}
	return time.Duration(ticks) * 10 * time.Millisecond, nil
}
