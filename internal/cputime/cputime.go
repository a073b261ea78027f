// SPDX-License-Identifier: Apache-2.0

// Package cputime reads the CPU time of processes and of the machine.
package cputime

import (
	"bufio"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Of is the CPU time, user and system, of a process so far, from its CPU clock:
// /proc would count in ticks.
func Of(pid int) (time.Duration, error) {
	const schedClock = 2
	var ts unix.Timespec
	if err := unix.ClockGettime(int32(^pid)<<3|schedClock, &ts); err != nil {
		return 0, fmt.Errorf("CPU clock of process %d: %w", pid, err)
	}
	return time.Duration(ts.Nano()), nil
}

// Machine is the CPU time of all programs of this machine so far, including the
// time that a hypervisor took. It counts in ticks.
func Machine() (time.Duration, error) {
	f, err := os.Open("/proc/stat")
	if err != nil {
		return 0, err
	}
	defer f.Close()
	line, err := bufio.NewReader(f).ReadString('\n')
	if err != nil {
		return 0, fmt.Errorf("read /proc/stat: %w", err)
	}
	return parseMachine(line)
}

// parseMachine reads: cpu user nice system idle iowait irq softirq steal …
func parseMachine(line string) (time.Duration, error) {
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
