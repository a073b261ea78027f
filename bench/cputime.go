// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"slices"
	"time"

	"github.com/ringbatch/ringbatch/test/testbed"
)

// cpuGroup is processes whose CPU time is added up.
type cpuGroup struct {
	pids []int
	// foreign ones may end, or belong to somebody else: what was seen last of
	// them counts.
	foreign map[int]time.Duration
}

func cpuOf(processes ...*testbed.Process) (g cpuGroup) {
	for _, p := range processes {
		g.pids = append(g.pids, p.Pid())
	}
	return g
}

// foreignCPU watches processes that others have started.
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
