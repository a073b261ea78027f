// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"strings"
	"time"

	"github.com/ringbatch/ringbatch/internal/testbed"
)

// cpuBook adds up what processes spend in their turns: beside the rates, since
// it depends less on what else the machine does.
type cpuBook struct {
	pids     []int
	before   []time.Duration
	spent    []time.Duration
	requests float64
}

func (b *cpuBook) begin(pids []int) {
	b.pids, b.before = pids, b.before[:0]
	for _, pid := range pids {
		t, _ := testbed.CPUTime(pid)
		b.before = append(b.before, t)
	}
}

func (b *cpuBook) end(requests float64) {
	if b.spent == nil {
		b.spent = make([]time.Duration, len(b.pids))
	}
	for i, pid := range b.pids {
		t, _ := testbed.CPUTime(pid)
		b.spent[i] += t - b.before[i]
	}
	b.requests += requests
}

func (b *cpuBook) String() string {
	var parts []string
	for _, t := range b.spent {
		parts = append(parts, fmt.Sprintf("%.1f µs", float64(t.Microseconds())/b.requests))
	}
	return strings.Join(parts, " + ")
}
