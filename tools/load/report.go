// SPDX-License-Identifier: Apache-2.0

package load

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/ringbatch/ringbatch/internal/printable"
)

// Print writes the result as tables.
func (r *Result) Print(w io.Writer) {
	c := r.Config
	fmt.Fprintln(w, c.headline())
	if r.Note != "" {
		fmt.Fprintf(w, "note: %s\n", r.Note)
	}
	fmt.Fprintf(w, "\n%-14s %s requests/s, %s items/s", "throughput", printable.Number(r.Throughput), printable.Number(r.ItemsPerS))
	if r.Bound != nil {
		fmt.Fprintf(w, " = %.1f %% of the bound", 100*r.RatioToBound)
	}
	fmt.Fprintln(w)
	if b := r.Bound; b != nil {
		fmt.Fprintf(w, "%-14s %s items/s, %s ms a batch: %d process(es) feeding themselves batches of %d, in turns with the above; "+
			"%s µs CPU an item\n", "bound", printable.Number(b.ItemsPerS), printable.Number(b.Latency.Avg), c.ModelNum, c.MaxBatchSize, printable.Number(b.CPU))
	}
	l := r.Latency
	fmt.Fprintf(w, "%-14s avg %s  p50 %s  p90 %s  p95 %s  p99 %s  p99.9 %s  max %s", "latency, ms",
		printable.Number(l.Avg), printable.Number(l.P50), printable.Number(l.P90), printable.Number(l.P95), printable.Number(l.P99), printable.Number(l.P999), printable.Number(l.Max))
	if c.Rate > 0 {
		fmt.Fprint(w, "   (from the intended send time)")
	}
	fmt.Fprintln(w)
	if a := r.Alone; a != nil {
		fmt.Fprintf(w, "%-14s avg %s  p50 %s: a process that runs each request by itself, in turns with the above; "+
			"through ringbatch %+.1f %%\n", "model alone", printable.Number(a.Latency.Avg), printable.Number(a.Latency.P50), 100*(r.RatioToAlone-1))
	}
	if !c.NoDynamicBatch {
		fmt.Fprintf(w, "\nwhere the time went, average per request\n")
		printBars(w, stageNames[:], r.Breakdown.each(), "ms")
		printBatches(w, r.BatchSize)
		fmt.Fprintf(w, "\n%-14s broker %s  producers %s  workers %s\n", "CPU µs/request", printable.Number(r.CPU.Broker), printable.Number(r.CPU.Client),
			printable.Number(r.CPU.Worker))
	} else {
		fmt.Fprintf(w, "%-14s %s\n", "CPU µs/request", printable.Number(r.CPU.Client))
	}
	fmt.Fprintf(w, "%-14s %s\n", "errors", errorList(r.Errors))
	r.printStability(w)
	if b := r.busy(); b != "" {
		fmt.Fprintf(w, "%-14s %s meanwhile: measure again when it is quiet\n", "WARNING", b)
	}
}

// headline names the measured configuration.
func (c *Config) headline() string {
	if c.NoDynamicBatch {
		return fmt.Sprintf("%s: %d processes, each running the model by itself on %d row(s)", c.ModelType, c.WorkerNum, c.WorkerBatch)
	}
	load := fmt.Sprintf("%d in flight each", c.InFlight)
	if c.Rate > 0 {
		load = fmt.Sprintf("%s requests/s arriving at random, at most %d in flight each", printable.Number(c.Rate), c.InFlight)
	}
	return fmt.Sprintf("%s: %d producers, %d row(s) per request, %s; batches up to %d, wait %v, %d model process(es)",
		c.ModelType, c.WorkerNum, c.WorkerBatch, load, c.MaxBatchSize, c.WaitTime, c.ModelNum)
}

func (r *Result) printStability(w io.Writer) {
	c := r.Config
	if r.Stable {
		fmt.Fprintf(w, "%-14s the last %d of %d windows of %v agree within %v %%\n", "stability", MinWindows, len(r.Windows), c.Duration,
			c.Stability)
	} else {
		fmt.Fprintf(w, "%-14s NOT STABLE: the last %d of %d windows of %v do not agree within %v %%; measure for longer\n", "stability",
			min(MinWindows, len(r.Windows)), len(r.Windows), c.Duration, c.Stability)
	}
}

// busy warns of other programs, which spoil the figures.
func (r *Result) busy() string {
	if r.OtherCPU < BusyPercent {
		return ""
	}
	return fmt.Sprintf("other programs used %.0f %% of this machine", r.OtherCPU)
}

// BusyPercent of other programs spoil the figures.
const BusyPercent = 5

func bar(share float64) string { return strings.Repeat("█", int(share*40+0.5)) }

// printBars draws one bar for each value.
func printBars(w io.Writer, names []string, values [len(stageNames)]float64, unit string) {
	total := 0.0
	for _, v := range values {
		total += v
	}
	for i, name := range names {
		share := 0.0
		if total > 0 {
			share = values[i] / total
		}
		fmt.Fprintf(w, "  %-10s %9s %s %5.1f %%  %s\n", name, printable.Number(values[i]), unit, 100*share, bar(share))
	}
}

// printBatches draws the histogram of batch sizes, in at most a dozen lines.
func printBatches(w io.Writer, b batchSizes) {
	fmt.Fprintf(w, "\nbatch size, rows: average %s\n", printable.Number(b.Avg))
	sizes := slices.Sorted(maps.Keys(b.Histogram))
	if len(sizes) == 0 {
		return
	}
	var total uint64
	for _, n := range b.Histogram {
		total += n
	}
	step := (sizes[len(sizes)-1] + 11) / 12
	for low := 1; low <= sizes[len(sizes)-1]; low += step {
		var n uint64
		for _, s := range sizes {
			if s >= low && s < low+step {
				n += b.Histogram[s]
			}
		}
		if n == 0 {
			continue
		}
		label := fmt.Sprint(low)
		if step > 1 {
			label = fmt.Sprintf("%d–%d", low, min(low+step-1, sizes[len(sizes)-1]))
		}
		share := float64(n) / float64(total)
		fmt.Fprintf(w, "  %-10s %9s    %5.1f %%  %s\n", label, printable.Number(float64(n)), 100*share, bar(share))
	}
}

func errorList(errs map[string]int64) string {
	if len(errs) == 0 {
		return "none"
	}
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(errs)) {
		parts = append(parts, fmt.Sprintf("%s %d", name, errs[name]))
	}
	return strings.Join(parts, ", ")
}
