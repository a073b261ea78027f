// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"slices"
	"time"

	"github.com/ringbatch/ringbatch/test/testbed"
)

// cpuGroup adds up the CPU time of processes.
type cpuGroup struct {
	pids    []int
	foreign map[int]time.Duration // last time of processes that may end; nil: they may not
}

func cpuOf(processes ...*testbed.Process) (g cpuGroup) {
	for _, p := range processes {
		g.pids = append(g.pids, p.Pid())
	}
	return g
}

// foreignCPU watches processes that this program has not started.
func foreignCPU(pids ...int) cpuGroup {
	return cpuGroup{pids: pids, foreign: map[int]time.Duration{}}
}

func (g *cpuGroup) has(pid int) bool { return slices.Contains(g.pids, pid) }

func (g *cpuGroup) time() (sum time.Duration, err error) {
	for _, pid := range g.pids {
		d, err := testbed.CPUTime(pid)
		switch {
		case err != nil && g.foreign == nil:
			return 0, err
		case err != nil:
			d = g.foreign[pid]
		case g.foreign != nil:
			g.foreign[pid] = d
		}
		sum += d
	}
	return sum, nil
}
