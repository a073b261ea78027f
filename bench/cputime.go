// SPDX-License-Identifier: Apache-2.0

package bench

import (
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
