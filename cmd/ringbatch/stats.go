// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/admin/stats"
	"github.com/ringbatch/ringbatch/internal/printable"
	"github.com/ringbatch/ringbatch/internal/typo"
	"github.com/ringbatch/ringbatch/tensor"
)

func runStats(ctx context.Context, args []string) error {
	f := flags("stats", " [MODEL]", `Print the broker's statistics: per model the last 1, 10 and 60 seconds, then queue, batches, batch
sizes and latencies by stage since the start; per worker its state.`, `  ringbatch stats
  ringbatch stats --json | jq '.models[0].latency_ms'
  ringbatch stats --interval 1s
`)
	socket := socketFlag(f)
	asJSON := f.Bool("json", false, "print JSON, as docs/stats.md describes it")
	interval := f.Duration("interval", 0, "print again at this interval until Ctrl-C")
	if err := parse(f, args, 0, 1); err != nil {
		return err
	}
	for {
		raw, s, err := fetchStats(ctx, *socket)
		if err != nil {
			return err
		}
		if f.NArg() == 1 {
			wanted, names := map[string]bool{f.Arg(0): true}, modelNames(s)
			s.Aliases = slices.DeleteFunc(s.Aliases, func(a stats.Alias) bool { return a.Name != f.Arg(0) })
			for _, a := range s.Aliases {
				for _, t := range a.To {
					wanted[t.Model] = true
				}
			}
			s.Models = slices.DeleteFunc(s.Models, func(m stats.Model) bool { return !wanted[m.Name] })
			if len(s.Models) == 0 {
				return fmt.Errorf("no such model: %q%s; ringbatch models lists them", f.Arg(0), typo.DidYouMean(f.Arg(0), names))
			}
			raw, _ = json.Marshal(s)
		}
		var out bytes.Buffer
		if *asJSON {
			_ = json.Indent(&out, raw, "", "  ")
			out.WriteByte('\n')
		} else {
			printStats(&out, s)
		}
		if _, err := os.Stdout.Write(out.Bytes()); err != nil {
			return err // for example a full disk
		}
		if *interval <= 0 {
			return nil
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(*interval):
		}
	}
}

func modelNames(s *stats.Broker) (names []string) {
	for i := range s.Models {
		names = append(names, s.Models[i].Name)
	}
	for _, a := range s.Aliases {
		names = append(names, a.Name)
	}
	return names
}

func fetchStats(ctx context.Context, socket string) ([]byte, *stats.Broker, error) {
	raw, err := admin.New(socket).StatsJSON(ctx)
	if err != nil {
		return nil, nil, err
	}
	var s stats.Broker
	if err := json.Unmarshal(raw, &s); err != nil {
		return nil, nil, fmt.Errorf("statistics: %w", err)
	}
	return raw, &s, nil
}

func printStats(out io.Writer, s *stats.Broker) {
	state := ""
	if s.Draining {
		state = ", draining"
	}
	fmt.Fprintf(out, "broker pid %d, up %s%s, %s\n", s.Pid, seconds(s.UptimeS), state, s.Socket)
	if len(s.Models) == 0 {
		fmt.Fprintln(out, "no models yet: start a worker, or declare one with --config or --model")
	}
	for _, a := range s.Aliases {
		for i, t := range a.To {
			name := "alias " + a.Name
			if i > 0 {
				name = ""
			}
			fmt.Fprintf(out, "%-20s → %s  %v %%, %d clients\n", name, t.Model, t.SharePercent, t.Clients)
		}
	}
	for i := range s.Models {
		printModel(out, &s.Models[i])
	}
	for i := range s.Weights {
		fmt.Fprintf(out, "\n%s   %s\n", s.Weights[i].Model, &s.Weights[i])
	}
	printProcesses(out, s)
}

func printModel(out io.Writer, m *stats.Model) {
	fmt.Fprintf(out, "\n%s   %s\n", m.Name, m.Signature)
	printWindows(out, m)
	if s := m.Staffing; s != nil {
		fmt.Fprintf(out, "  %s for %s: %s; woke %d times, the last in %.1f s, slept %d times, %d starts failed\n", s.State, seconds(s.SinceS),
			cmp.Or(s.Failed, s.Why), s.Wakes, s.WakeMS/1e3, s.Sleeps, s.FailedWakes)
	}
	fmt.Fprintf(out, "  max_batch_size %d, wait_time %s; %d clients, %d of %d slots free, %d queued, %d running\n",
		m.MaxBatchSize, waitText(m), m.Clients, m.SlotsFree, m.Slots, m.SlotsQueued, m.SlotsRunning)
	fmt.Fprintf(out, "  queue %d requests (%d rows); since the start %d requests, %d batches, %.1f rows a batch\n",
		m.QueueLength, m.QueueRows, m.Requests, m.Batches, m.BatchSize.Avg)
	fmt.Fprintf(out, "  ended: %s; sent out: %s", counts(m.Ended), counts(m.Reasons))
	if m.Requeued+m.Isolated+m.WorkersLost+m.WorkersHung+m.WorkersSuspended+m.Offenders > 0 {
		fmt.Fprintf(out, "; requeued %d, isolated %d, workers lost %d, hung %d, suspended %d, offenders %d",
			m.Requeued, m.Isolated, m.WorkersLost, m.WorkersHung, m.WorkersSuspended, m.Offenders)
	}
	if m.StateBytes > 0 {
		fmt.Fprintf(out, "\n  state: %.1f MiB for all slots; %d sequences begun or reset", float64(m.StateBytes)/(1<<20), m.StateBegun)
	}
	fmt.Fprint(out, "\n\n  since the start\n")
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "  ms\tavg\tp50\tp90\tp99\tmax\t")
	for _, row := range []struct {
		name string
		p    stats.Percentiles
	}{{"queue", m.Latency.Queue}, {"dispatch", m.Latency.Dispatch}, {"compute", m.Latency.Compute}, {"total", m.Latency.Total}} {
		fmt.Fprintf(w, "  %s\t%.3f\t%.3f\t%.3f\t%.3f\t%.3f\t\n", row.name, row.p.Avg, row.p.P50, row.p.P90, row.p.P99, row.p.Max)
	}
	w.Flush()
	printSizes(out, m)
	printLearned(out, m)
	switch {
	case len(m.Stages) > 0:
		fmt.Fprintf(out, "\n  a pipeline: its workers are those of %s\n", strings.Join(m.Stages, ", "))
		return
	case len(m.Workers) == 0 && m.Staffing.IsAsleep():
		fmt.Fprintf(out, "\n  no worker: the model is %s; a request wakes it, and waits\n", m.Staffing.State)
		return
	case len(m.Workers) == 0:
		fmt.Fprintln(out, "\n  no worker: requests wait until one registers or their deadline passes")
		return
	}
	fmt.Fprintln(out)
	w = tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "  worker\tname\tpid\tgpu\tstate\tsince\tbatches\tbusy\trestarts")
	for _, k := range m.Workers {
		name, gpu := printable.Text(k.Name, tensor.MaxNameBytes), printable.Text(cmp.Or(k.GPU, "-"), tensor.MaxNameBytes)
		fmt.Fprintf(w, "  %d\t%s\t%d\t%s\t%s\t%s\t%d\t%.0f %%\t%d\n",
			k.ID, name, k.Pid, gpu, k.Doing(), seconds(k.SinceS), k.Batches, 100*k.BusyS/float64(max(k.Lanes, 1))/max(k.SinceS, 1e-9), k.Restarts)
	}
	w.Flush()
}

// printProcesses prints the worker processes that the broker started.
func printProcesses(out io.Writer, s *stats.Broker) {
	if len(s.Processes) == 0 {
		return
	}
	fmt.Fprintf(out, "\nstarted by the broker (MPS: %s)\n", s.MPS)
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "  process\tpid\tgpu\tstate\tsince\trestarts\tlast end")
	for _, p := range s.Processes {
		gpu := "-"
		if p.GPU != nil {
			gpu = fmt.Sprint(*p.GPU)
		}
		fmt.Fprintf(w, "  %s\t%d\t%s\t%s\t%s\t%d\t%s\n", p.Name, p.Pid, gpu, p.State, seconds(p.SinceS), p.Restarts, p.LastEnd)
	}
	w.Flush()
}

// printWindows prints the last 1, 10 and 60 seconds.
func printWindows(out io.Writer, m *stats.Model) {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "  last\trequests/s\trows/s\tp50 ms\tp99 ms\trows a batch\tbusy\tfailed/s\t")
	for _, x := range m.Windows {
		fmt.Fprintf(w, "  %d s\t%.1f\t%.1f\t%.3f\t%.3f\t%.1f\t%.0f %%\t%.1f\t\n",
			x.Seconds, x.RequestsPerS, x.RowsPerS, x.Latency.P50, x.Latency.P99, x.RowsPerBatch, 100*x.Busy, x.FailedPerS)
	}
	w.Flush()
	fmt.Fprintln(out)
}

// printSizes draws the batch-size histogram.
func printSizes(out io.Writer, m *stats.Model) {
	var most uint64
	var sizes []int
	for size, n := range m.BatchSize.Histogram {
		sizes = append(sizes, size)
		most = max(most, n)
	}
	if most == 0 {
		return
	}
	slices.Sort(sizes)
	fmt.Fprintln(out, "\n  rows  batches")
	for _, size := range sizes {
		n := m.BatchSize.Histogram[size]
		fmt.Fprintf(out, "  %4d  %-40s %d\n", size, strings.Repeat("█", int(max(1, n*40/most))), n)
	}
}

func counts(m map[string]uint64) string {
	if len(m) == 0 {
		return "none"
	}
	var parts []string
	for k, n := range m {
		parts = append(parts, fmt.Sprintf("%s %d", k, n))
	}
	slices.Sort(parts)
	return strings.Join(parts, ", ")
}

func seconds(s float64) string {
	return time.Duration(s * float64(time.Second)).Round(time.Second).String()
}

func runModels(ctx context.Context, args []string) error {
	f := flags("models", "", "List the broker's models with their signatures.", "")
	socket := socketFlag(f)
	asJSON := f.Bool("json", false, "print JSON")
	if err := parse(f, args, 0, 0); err != nil {
		return err
	}
	models, err := admin.New(*socket).Models(ctx)
	if err != nil {
		return err
	}
	if *asJSON {
		type line struct {
			Name         string `json:"name"`
			Signature    string `json:"signature"`
			MaxBatchSize int    `json:"max_batch_size"`
			Workers      int    `json:"workers"`
			Clients      int    `json:"clients"`
		}
		lines := []line{}
		for _, m := range models {
			size, _ := strconv.Atoi(m.Policy["max_batch_size"])
			lines = append(lines, line{m.Name, m.Signature.String(), size, m.Workers, m.Clients})
		}
		return json.NewEncoder(os.Stdout).Encode(lines)
	}
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "model\tsignature\tmax batch\tworkers\tclients")
	for _, m := range models {
		fmt.Fprintf(w, "%s\t%s\t%s\t%d\t%d\n", m.Name, m.Signature.String(), m.Policy["max_batch_size"], m.Workers, m.Clients)
	}
	return w.Flush()
}

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
		parts = append(parts, fmt.Sprintf("%s %s", l.Costs[i].Size(), inMS(l.Costs[i].MS)))
	}
	if last := len(l.Costs) - 1; last%step != 0 {
		parts = append(parts, fmt.Sprintf("%s %s", l.Costs[last].Size(), inMS(l.Costs[last].MS)))
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
