package main

import (
	"context"
	"fmt"
	"io"
	"time"
)

// The demo: what a newcomer runs first. Five lines and one sentence.

// demoReport is its JSON.
type demoReport struct {
	Suite  string     `json:"suite"`
	Config *config    `json:"config"`
	Note   string     `json:"note,omitempty"`
	Lines  []demoLine `json:"lines"`
}

type demoLine struct {
	Name string `json:"name"`
	*result
}

const (
	demoDuration  = 800 * time.Millisecond
	demoWarmup    = 400 * time.Millisecond
	demoWindows   = 5
	demoProducers = 32
)

// The lines, in order.
const (
	demoAlone = iota
	demoEach
	demoNow
	demoWait
	demoBound
)

func runDemo(ctx context.Context, cfg *config, say *progress) (*demoReport, error) {
	r := &demoReport{Suite: "demo", Config: cfg, Note: cfg.note()}
	f, err := newFleet(ctx)
	if err != nil {
		return r, err
	}
	defer f.close()
	n := cfg.WorkerNum
	now := *cfg
	now.WaitTime = 0
	fullBatches := func() (*result, error) {
		return f.alone(cfg, cfg.ModelNum, cfg.MaxBatchSize, "the bound", say)
	}
	first, err := fullBatches()
	if err != nil {
		return r, err
	}
	for _, l := range []struct {
		name string
		run  func() (*result, error)
	}{
		{"one process alone", func() (*result, error) { return f.alone(cfg, 1, 1, "one process alone", say) }},
		{fmt.Sprintf("%d processes, each on its own", n), func() (*result, error) { return f.alone(cfg, n, 1, "each on its own", say) }},
		{fmt.Sprintf("%d producers, ringbatch, no waiting", n), func() (*result, error) { return measureOnce(f, &now, n, say) }},
		{fmt.Sprintf("%d producers, ringbatch, wait %v", n, cfg.WaitTime), func() (*result, error) { return measureOnce(f, cfg, n, say) }},
		{fmt.Sprintf("bound: full batches of %d, no producers", cfg.MaxBatchSize), func() (*result, error) {
			last, err := fullBatches()
			if err == nil {
				last.ItemsPerS = (first.ItemsPerS + last.ItemsPerS) / 2 // before and after the others
			}
			return last, err
		}},
	} {
		res, err := l.run()
		if err != nil {
			return r, fmt.Errorf("%s: %w", l.name, err)
		}
		r.Lines = append(r.Lines, demoLine{l.name, res})
	}
	return r, nil
}

func (r *demoReport) print(w io.Writer) {
	fmt.Fprintf(w, "%s, %d model process(es)\n", r.Config.ModelType, r.Config.ModelNum)
	if r.Note != "" {
		fmt.Fprintf(w, "note: %s\n", r.Note)
	}
	fmt.Fprintf(w, "\n%-42s %9s %9s %9s %10s\n", "", "items/s", "avg ms", "p95 ms", "batch size")
	for _, l := range r.Lines {
		fmt.Fprintf(w, "%-42s %9s %9s %9s %10s%s\n", l.Name, big(l.ItemsPerS), short(l.Latency.Avg), short(l.Latency.P95), short(l.BatchSize.Avg), unstable(l.result))
	}
	if s := r.sentence(); s != "" {
		fmt.Fprintf(w, "\n%s\n", s)
	}
}

// sentence says what was won.
func (r *demoReport) sentence() string {
	if len(r.Lines) <= demoBound {
		return ""
	}
	each, best, bound := r.Lines[demoEach].result, r.Lines[demoWait].result, r.Lines[demoBound].result
	how := fmt.Sprintf("waiting at most %v for company", r.Config.WaitTime)
	if now := r.Lines[demoNow].result; now.ItemsPerS > best.ItemsPerS {
		best, how = now, "without waiting"
	}
	note := ""
	if r.Note != "" {
		note = " (simulated)"
	}
	return fmt.Sprintf("Through ringbatch, %s, the same %d producers did %.1f times the work that they did each on its own, at %s of the latency, and %.0f %% of what the model can do at all%s.",
		how, r.Config.WorkerNum, best.ItemsPerS/each.ItemsPerS, fraction(best.Latency.Avg/each.Latency.Avg), 100*best.ItemsPerS/bound.ItemsPerS, note)
}

func fraction(v float64) string {
	if v < 0.67 {
		return fmt.Sprintf("1/%.0f", 1/v)
	}
	return fmt.Sprintf("%.1f times", v)
}
