// SPDX-License-Identifier: Apache-2.0

package rig

import (
	"slices"
	"time"

	"github.com/ringbatch/ringbatch/internal/cputime"
	"github.com/ringbatch/ringbatch/test/testbed"
)

// Median is 0 without figures.
func Median(v []float64) float64 {
	if len(v) == 0 {
		return 0
	}
	v = slices.Sorted(slices.Values(v))
	if n := len(v); n%2 == 0 {
		return (v[n/2-1] + v[n/2]) / 2
	}
	return v[len(v)/2]
}

// CPUTimes adds up the CPU time of each group of processes.
func (r *Rig) CPUTimes(groups [][]*testbed.Process) []time.Duration {
	sums := make([]time.Duration, len(groups))
	for i, g := range groups {
		for _, p := range g {
			d, err := cputime.Of(p.Pid())
			r.Must(err)
			sums[i] += d
		}
	}
	return sums
}

// OrderAll sends one command to all processes and gathers their answers.
func OrderAll[R any](r *Rig, procs []*testbed.Process, order any) []R {
	for _, p := range procs {
		r.Must(p.Send(order))
	}
	results := make([]R, len(procs))
	for i, p := range procs {
		r.Must(p.Receive(&results[i]))
	}
	return results
}
