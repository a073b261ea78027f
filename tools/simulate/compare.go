// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"context"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/ringbatch/ringbatch/internal/printable"
)

// Comparison has the results of several numbers of workers and batch sizes under one load.
type Comparison struct {
	Load    string   `json:"load"`
	Goal    string   `json:"latency_goal,omitempty"`
	Choices []Choice `json:"choices"`
	Best    *Choice  `json:"best,omitempty"`
	goal    time.Duration
	open    bool // the load does not wait for answers
}

// Choice is a number of workers with a batch size, and what they give.
type Choice struct {
	Workers           int     `json:"workers"`
	MaxBatchSize      int     `json:"max_batch_size"`
	RequestsPerSecond float64 `json:"requests_per_second"`
	Missed            int     `json:"missed"` // requests that were late, expired, timed out or refused
	Latency           Latency `json:"latency_ms"`
	MeanBatchRows     float64 `json:"mean_batch_rows"`
	Busy              float64 `json:"busy"` // the workers' share of the time

	load float64 // the share of the capacity that came
}

// mostUseful is the share of the capacity that an open load may need: beyond it a queue grows.
const mostUseful = 0.98

// compare simulates the load with each choice. Without a load in its flags, a running model gets a closed
// loop, which shows the most that it can do.
func (c *Command) compare(ctx context.Context, cfg Config) (*Comparison, error) {
	sizes := c.sizes
	if len(sizes) == 0 {
		sizes = []int{cfg.Policy.MaxBatchSize}
	}
	if c.measured != nil && !c.set.Changed("rate") && !c.set.Changed("arrivals") {
		cfg.Arrivals = ClosedLoop{Clients: or(c.clients, 64), InFlight: c.inFlight, Think: c.think}
	}
	_, closed := cfg.Arrivals.(ClosedLoop)
	t := &Comparison{Load: cfg.Arrivals.String(), goal: cfg.Policy.LatencyGoal, open: !closed}
	if t.goal > 0 {
		t.Goal = t.goal.String()
	}
	for _, workers := range c.workers {
		for _, size := range sizes {
			if size < cfg.Load.MaxRows {
				continue
			}
			one := cfg
			one.Workers.Count, one.Policy.MaxBatchSize = workers, size
			r, err := Run(ctx, one)
			if err != nil {
				return nil, err
			}
			t.Choices = append(t.Choices, choiceOf(&one, r))
		}
	}
	for i := range t.Choices {
		if x := &t.Choices[i]; t.serves(x) && (t.Best == nil || t.better(x, t.Best)) {
			t.Best = x
		}
	}
	return t, nil
}

func choiceOf(cfg *Config, r *Result) Choice {
	o := &r.Outcomes
	x := Choice{Workers: cfg.Workers.Count, MaxBatchSize: cfg.Policy.MaxBatchSize, RequestsPerSecond: r.RequestsPerSecond, Latency: r.Latency,
		MeanBatchRows: r.MeanBatchRows,
		load:          float64(cfg.Requests) / r.arrivals.Seconds() / Capacity(cfg), Missed: o.Late + o.Expired + o.TimedOut + o.Refused}
	for _, w := range r.Workers {
		x.Busy += w.Utilisation / float64(cfg.Workers.Count)
	}
	return x
}

// serves reports whether a choice carries the load, within the goal.
func (t *Comparison) serves(x *Choice) bool {
	return !(t.open && x.load > mostUseful) && (t.goal == 0 || x.Latency.P99 <= t.goal && x.Missed == 0)
}

// better prefers fewer workers, then less latency. In a closed loop 5 % more requests come first.
func (t *Comparison) better(x, than *Choice) bool {
	if ratio := x.RequestsPerSecond / than.RequestsPerSecond; !t.open && (ratio > 1.05 || ratio < 1/1.05) {
		return ratio > 1
	}
	if x.Workers != than.Workers {
		return x.Workers < than.Workers
	}
	return x.Latency.Avg < than.Latency.Avg
}

// WriteText writes a table, with a star at the best choice.
func (t *Comparison) WriteText(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "%s\n\n", t.Load)
	table := tabwriter.NewWriter(&b, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(table, "workers\tmax_batch_size\trequests/s\tmean\tp99\trows per batch\tbusy\tmissed\t\t")
	for i := range t.Choices {
		x, mark := &t.Choices[i], ""
		if t.Best != nil && *x == *t.Best {
			mark = "*"
		}
		fmt.Fprintf(table, "%d\t%d\t%s\t%s\t%s\t%.1f\t%.0f %%\t%s\t%s\t\n", x.Workers, x.MaxBatchSize, printable.Number(x.RequestsPerSecond),
			short(x.Latency.Avg), short(x.Latency.P99), x.MeanBatchRows, 100*x.Busy, count(x.Missed), mark)
	}
	table.Flush()
	switch {
	case t.Best != nil:
		fmt.Fprintf(&b, "\n* best: instances = %d, max_batch_size = %d\n", t.Best.Workers, t.Best.MaxBatchSize)
	case t.goal > 0:
		fmt.Fprintf(&b, "\nNo choice carries this load with a p99 of at most %v. Try more --workers.\n", t.goal)
	default:
		b.WriteString("\nNo choice carries this load. Try more --workers.\n")
	}
	_, err := io.WriteString(w, b.String())
	return err
}
