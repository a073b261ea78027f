// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/ringbatch/ringbatch/admin/stats"
)

// inMS writes milliseconds for people: 3ms, 1.5s, 250µs.
func inMS(ms float64) string {
	d := time.Duration(ms * float64(time.Millisecond))
	for step := time.Duration(1); step <= d; step *= 10 {
		if d < 1000*step { // three digits
			return d.Round(step).String()
		}
	}
	return "0s"
}

func waitText(m *stats.Model) string {
	if m.LatencyGoalMS > 0 {
		return fmt.Sprintf("auto, %s now, for a latency_goal of %s", inMS(m.WaitTimeMS), inMS(m.LatencyGoalMS))
	}
	if m.Learned.OneAtATime {
		return "auto, one batch at a time now"
	}
	if m.WaitAuto {
		return fmt.Sprintf("auto, %s now", inMS(m.WaitTimeMS))
	}
	return inMS(m.WaitTimeMS)
}

// printLearned prints the measured costs and waits in a few lines.
func printLearned(out io.Writer, m *stats.Model) {
	l := &m.Learned
	if len(l.Costs) == 0 {
		return
	}
	const most = 8
	var parts []string
	step := max(1, (len(l.Costs)+most-1)/most)
	for i := 0; i < len(l.Costs); i += step {
		parts = append(parts, fmt.Sprintf("%d rows %s", l.Costs[i].Rows, inMS(l.Costs[i].MS)))
	}
	if last := len(l.Costs) - 1; last%step != 0 {
		parts = append(parts, fmt.Sprintf("%d rows %s", l.Costs[last].Rows, inMS(l.Costs[last].MS)))
	}
	fmt.Fprintf(out, "\n  a batch takes: %s", strings.Join(parts, ", "))
	if n := len(l.Slowdown); n > 1 {
		fmt.Fprintf(out, "; %.2f times as long with %d other busy", l.Slowdown[n-1], n-1)
	}
	fmt.Fprintln(out)
	if sentence := goalTooShort(m); sentence != "" {
		fmt.Fprintf(out, "  %s\n", sentence)
	}
	if len(l.Tried) > 1 {
		parts = parts[:0]
		for _, t := range l.Tried {
			wait := inMS(t.WaitMS)
			if t.OneAtATime {
				wait = "one batch at a time"
			}
			parts = append(parts, fmt.Sprintf("%s %.2f", wait, t.Latency))
		}
		fmt.Fprintf(out, "  latency of the last requests with other waits, against none: %s\n", strings.Join(parts, ", "))
	}
}

// goalTooShort is a sentence about a latency goal that no batch can keep, or "".
func goalTooShort(m *stats.Model) string {
	if m.LatencyGoalMS == 0 || len(m.Learned.Costs) == 0 {
		return ""
	}
	often := slices.MaxFunc(m.Learned.Costs, func(a, b stats.LearnedCost) int { return cmp.Compare(a.Batches, b.Batches) })
	quickest := often.MS
	for _, c := range m.Learned.Costs {
		if c.Batches*16 >= often.Batches { // figures of rare sizes may be old
			quickest = min(quickest, c.MS)
		}
	}
	if m.LatencyGoalMS >= quickest {
		return ""
	}
	return fmt.Sprintf("latency_goal is %s, but the quickest batch alone takes %s: it cannot be kept; set a longer one",
		inMS(m.LatencyGoalMS), inMS(quickest))
}
