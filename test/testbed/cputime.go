// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"bufio"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// CPUTime is the CPU time, user and system, of a process so far, from its CPU clock:
// /proc would count in ticks.
func CPUTime(pid int) (time.Duration, error) {
	const schedClock = 2
	var ts unix.Timespec
	if err := unix.ClockGettime(int32(^pid)<<3|schedClock, &ts); err != nil {
		return 0, fmt.Errorf("CPU clock of process %d: %w", pid, err)
	}
	return time.Duration(ts.Nano()), nil
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
			d, _ := CPUTime(p.Pid()) // it may have ended just now
			sum += d
		}
	}
	return sum
}

// MachineTime is the CPU time of all programs of this machine so far, including the
// time that a hypervisor took. It counts in ticks.
func MachineTime() (time.Duration, error) {
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
