// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/ringbatch/ringbatch/stats"
)

func waitText(m *stats.Model) string {
	if m.LatencyGoalMS > 0 {
		return fmt.Sprintf("auto, %.3g ms now, for a latency_goal of %.3g ms", m.WaitTimeMS, m.LatencyGoalMS)
	}
	if m.Learned.OneAtATime {
		return "auto, one batch at a time now"
	}
	if m.WaitAuto {
		return fmt.Sprintf("auto, %.3g ms now", m.WaitTimeMS)
	}
	return fmt.Sprintf("%.3g ms", m.WaitTimeMS)
}

// printLearned says what the batcher has found out, in a few lines however much
// that is.
func printLearned(out io.Writer, m *stats.Model) {
	l := &m.Learned
	if len(l.Costs) == 0 {
		return
	}
	const most = 8
	var parts []string
	step := max(1, (len(l.Costs)+most-1)/most)
	for i := 0; i < len(l.Costs); i += step {
		parts = append(parts, fmt.Sprintf("%d rows %.3g ms", l.Costs[i].Rows, l.Costs[i].MS))
	}
	if last := len(l.Costs) - 1; last%step != 0 {
		parts = append(parts, fmt.Sprintf("%d rows %.3g ms", l.Costs[last].Rows, l.Costs[last].MS))
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
			wait := fmt.Sprintf("%.3g ms", t.WaitMS)
			if t.OneAtATime {
				wait = "one batch at a time"
			}
			parts = append(parts, fmt.Sprintf("%s %.2f", wait, t.Latency))
		}
		fmt.Fprintf(out, "  latency of the last requests with other waits, against none: %s\n", strings.Join(parts, ", "))
	}
}

// goalTooShort is a sentence about a latency goal that no batch can keep, empty
// if there is none.
func goalTooShort(m *stats.Model) string {
	if m.LatencyGoalMS == 0 || len(m.Learned.Costs) == 0 {
		return ""
	}
	often := slices.MaxFunc(m.Learned.Costs, func(a, b stats.LearnedCost) int { return cmp.Compare(a.Batches, b.Batches) })
	quickest := often.MS
	for _, c := range m.Learned.Costs {
		if c.Batches*16 >= often.Batches { // what is known of rare sizes may be old
			quickest = min(quickest, c.MS)
		}
	}
	if m.LatencyGoalMS >= quickest {
		return ""
	}
	return fmt.Sprintf("latency_goal is %.3g ms, but the quickest batch alone takes %.3g ms: it cannot be kept; set a longer one", m.LatencyGoalMS, quickest)
}
