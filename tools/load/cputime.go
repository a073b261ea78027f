// SPDX-License-Identifier: Apache-2.0

package load

import (
	"slices"
	"time"

	"github.com/ringbatch/ringbatch/internal/cputime"
)

// CPUGroup adds up the CPU time of processes.
type CPUGroup struct {
	pids    []int
	foreign map[int]time.Duration // last time of processes that may end; nil: they may not
}

// CPUOf watches processes that this program has started: one that cannot be read is an error.
func CPUOf(pids ...int) CPUGroup { return CPUGroup{pids: pids} }

// foreignCPU watches processes that this program has not started.
func foreignCPU(pids ...int) CPUGroup {
	return CPUGroup{pids: pids, foreign: map[int]time.Duration{}}
}

func (g *CPUGroup) has(pid int) bool { return slices.Contains(g.pids, pid) }

func (g *CPUGroup) time() (sum time.Duration, err error) {
	for _, pid := range g.pids {
		d, err := cputime.Of(pid)
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
