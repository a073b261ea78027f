package bench

import (
	"bufio"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/ringbatch/ringbatch/internal/testbed"
)

// cpuTimes adds up the CPU time of several processes.
func cpuTimes(procs []*testbed.Process) (sum time.Duration, err error) {
	for _, p := range procs {
		d, err := testbed.CPUTime(p.Pid())
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
