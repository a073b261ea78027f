// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/ringbatch/ringbatch/internal/progress"
)

// The tables suite: the three tables that people know from elsewhere, for
// whatever model is chosen.
//
//  1. processes × batch, nothing in between
//  2. dynamic batching against them
//  3. concurrency 2..16: no batching, batching, batching with two instances

// tablesReport is its JSON.
type tablesReport struct {
	Suite     string       `json:"suite"`
	Config    *config      `json:"config"`
	Note      string       `json:"note,omitempty"`
	Processes []tableRow   `json:"processes_x_batch"`
	Dynamic   []tableRow   `json:"dynamic_batching"`
	Sweeps    []tableSweep `json:"concurrency"`
}

// tableRow is one line: what was run, and what came out.
type tableRow struct {
	Processes int     `json:"processes"` // that run the model
	Batch     int     `json:"batch"`     // rows: of a batch, or at most
	Producers int     `json:"producers,omitempty"`
	WaitTime  seconds `json:"wait_time,omitempty"`
	RatioBest float64 `json:"ratio_to_best_without,omitempty"` // to the best line of table 1 with as many processes
	*result
}

// tableSweep is one column of table 3.
type tableSweep struct {
	Name   string    `json:"name"`
	Points []*result `json:"points"`
}

// Where the flags leave it open, a table's cells are measured more shortly
// than a single configuration.
const (
	tablesDuration = time.Second
	tablesWarmup   = 500 * time.Millisecond
	tablesWindows  = 5

	tablesMostProducers = 128
)

func runTables(ctx context.Context, cfg *config, say *progress.Line) (*tablesReport, error) {
	r := &tablesReport{Suite: "tables", Config: cfg, Note: cfg.note()}
	f, err := newFleet(ctx)
	if err != nil {
		return r, err
	}
	defer f.Close()
	for _, fill := range []func(*fleet, *progress.Line) error{r.fillProcesses, r.fillDynamic, r.fillSweeps} {
		if err := fill(f, say); err != nil {
			return r, err
		}
	}
	return r, nil
}

func (r *tablesReport) fillProcesses(f *fleet, say *progress.Line) error {
	top := r.Config.MaxBatchSize
	for _, c := range [][2]int{{1, 1}, {2, 1}, {4, 1}, {8, 1}, {1, max(1, top/4)}, {1, top}, {2, top}, {4, top}} {
		res, err := f.alone(r.Config, c[0], c[1], nil, say)
		if err != nil {
			return err
		}
		r.Processes = append(r.Processes, tableRow{Processes: c[0], Batch: c[1], result: res})
	}
	return nil
}

func (r *tablesReport) fillDynamic(f *fleet, say *progress.Line) error {
	base := r.Config
	for _, c := range []struct {
		producers, models, batch int
		wait                     time.Duration
	}{
		{8, 1, max(1, base.MaxBatchSize/8), 3 * time.Millisecond},
		{8, 2, max(1, base.MaxBatchSize/8), 3 * time.Millisecond},
		{64, 1, base.MaxBatchSize, 0},
		{64, 1, base.MaxBatchSize, base.WaitTime.d()},
		{128, 1, base.MaxBatchSize, 10 * time.Millisecond},
		{128, 2, base.MaxBatchSize, 10 * time.Millisecond},
	} {
		cfg := *base
		cfg.WorkerNum, cfg.ModelNum, cfg.MaxBatchSize, cfg.WaitTime = c.producers, c.models, c.batch, seconds(c.wait)
		res, err := measureOnce(f, &cfg, c.producers, nil, say)
		if err != nil {
			return err
		}
		row := tableRow{Processes: c.models, Batch: c.batch, Producers: c.producers, WaitTime: cfg.WaitTime, result: res}
		if best := r.best(c.models); best > 0 {
			row.RatioBest = res.ItemsPerS / best
		}
		r.Dynamic = append(r.Dynamic, row)
	}
	return nil
}

// best is the best line of table 1 with that many processes.
func (r *tablesReport) best(processes int) (items float64) {
	for _, row := range r.Processes {
		if row.Processes == processes {
			items = max(items, row.ItemsPerS)
		}
	}
	return items
}

func (r *tablesReport) fillSweeps(f *fleet, say *progress.Line) error {
	counts := interval{2, 16, 2}
	for _, c := range []struct {
		name          string
		batch, models int
	}{
		{"no batching", 1, 1}, {"batching", r.Config.MaxBatchSize, 1}, {"batching, 2 instances", r.Config.MaxBatchSize, 2},
	} {
		cfg := *r.Config
		cfg.MaxBatchSize, cfg.ModelNum, cfg.Concurrency = c.batch, c.models, counts
		points, err := sweepPoints(f, &cfg, counts.values(), nil, say)
		if err != nil {
			return err
		}
		r.Sweeps = append(r.Sweeps, tableSweep{c.name, points})
	}
	return nil
}

func (r *tablesReport) print(w io.Writer) {
	fmt.Fprintf(w, "%s\n", r.Config.ModelType)
	if r.Note != "" {
		fmt.Fprintf(w, "note: %s\n", r.Note)
	}
	fmt.Fprintf(w, "\n1. processes × batch, each process feeding itself\n%11s %8s %12s %9s %9s\n", "processes", "batch", "items/s", "avg ms", "p99 ms")
	for _, t := range r.Processes {
		fmt.Fprintf(w, "%11d %8d %12s %9s %9s%s\n", t.Processes, t.Batch, big(t.ItemsPerS), short(t.Latency.Avg), short(t.Latency.P99), t.marks())
	}
	fmt.Fprintf(w, "\n2. dynamic batching: producers with one row each, through ringbatch; \"of best\" is relative to the best of table 1 with as many model processes\n")
	fmt.Fprintf(w, "%11s %8s %8s %9s %12s %9s %9s %9s %9s\n", "producers", "models", "batch", "wait", "items/s", "avg ms", "p99 ms", "rows", "of best")
	for _, t := range r.Dynamic {
		fmt.Fprintf(w, "%11d %8d %8d %9v %12s %9s %9s %9s %8.0f%%%s\n", t.Producers, t.Processes, t.Batch, t.WaitTime, big(t.ItemsPerS),
			short(t.Latency.Avg), short(t.Latency.P99), short(t.BatchSize.Avg), 100*t.RatioBest, t.marks())
	}
	if len(r.Sweeps) == 0 {
		return
	}
	fmt.Fprintf(w, "\n3. concurrency: items/s and p95 ms\n%11s", "producers")
	for _, s := range r.Sweeps {
		fmt.Fprintf(w, " %24s", s.Name)
	}
	fmt.Fprintln(w)
	for i := range r.Sweeps[0].Points {
		fmt.Fprintf(w, "%11d", r.Sweeps[0].Points[i].Concurrency)
		for _, s := range r.Sweeps {
			if i < len(s.Points) {
				p := s.Points[i]
				fmt.Fprintf(w, " %12s %8s ms", big(p.ItemsPerS), short(p.Latency.P95))
			}
		}
		fmt.Fprintln(w)
	}
}

// marks is what a reader of one line of a table must know besides.
func (r *result) marks() string {
	mark := ""
	if !r.Stable {
		mark = "  not stable"
	}
	if b := r.busy(); b != "" {
		mark += "  " + b
	}
	return mark
}
