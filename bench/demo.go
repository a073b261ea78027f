// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/ringbatch/ringbatch/internal/progress"
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

func runDemo(ctx context.Context, cfg *config, say *progress.Line) (*demoReport, error) {
	r := &demoReport{Suite: "demo", Config: cfg, Note: cfg.note()}
	f, err := newFleet(ctx)
	if err != nil {
		return r, err
	}
	defer f.Close()
	bound, err := f.startBound(cfg, say)
	if err != nil {
		return r, err
	}
	n := cfg.WorkerNum
	now := *cfg
	now.WaitTime = 0
	for _, l := range []struct {
		name string
		run  func() (*result, error)
	}{
		{"one process alone", func() (*result, error) { return f.alone(cfg, 1, 1, nil, say) }},
		{fmt.Sprintf("%d processes, each on its own", n), func() (*result, error) { return f.alone(cfg, n, 1, nil, say) }},
		{fmt.Sprintf("%d producers, ringbatch, no waiting", n), func() (*result, error) { return measureOnce(f, &now, n, bound, say) }},
		{fmt.Sprintf("%d producers, ringbatch, wait %v", n, cfg.WaitTime), func() (*result, error) { return measureOnce(f, cfg, n, bound, say) }},
	} {
		res, err := l.run()
		if err != nil {
			return r, fmt.Errorf("%s: %w", l.name, err)
		}
		r.Lines = append(r.Lines, demoLine{l.name, res})
	}
	r.Lines = append(r.Lines, demoLine{fmt.Sprintf("bound: full batches of %d, no producers", cfg.MaxBatchSize), r.meanBound()})
	return r, nil
}

// meanBound is the bound as it was in turns with both lines of ringbatch.
func (r *demoReport) meanBound() *result {
	a, b := r.Lines[demoNow].Bound, r.Lines[demoWait].Bound
	m := &result{ItemsPerS: (a.ItemsPerS + b.ItemsPerS) / 2, Latency: a.Latency, Stable: true}
	m.Throughput = m.ItemsPerS / float64(r.Config.MaxBatchSize)
	m.BatchSize.Avg = float64(r.Config.MaxBatchSize)
	return m
}

func (r *demoReport) print(w io.Writer) {
	fmt.Fprintf(w, "%s, %d model process(es)\n", r.Config.ModelType, r.Config.ModelNum)
	if r.Note != "" {
		fmt.Fprintf(w, "note: %s\n", r.Note)
	}
	fmt.Fprintf(w, "\n%-42s %9s %9s %9s %10s\n", "", "items/s", "avg ms", "p95 ms", "batch size")
	for _, l := range r.Lines {
		fmt.Fprintf(w, "%-42s %9s %9s %9s %10s%s\n", l.Name, big(l.ItemsPerS), short(l.Latency.Avg), short(l.Latency.P95), short(l.BatchSize.Avg), l.marks())
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
	each, best := r.Lines[demoEach].result, r.Lines[demoWait].result
	how := fmt.Sprintf("waiting at most %v for others to batch with", r.Config.WaitTime)
	if now := r.Lines[demoNow].result; now.ItemsPerS > best.ItemsPerS {
		best, how = now, "without waiting"
	}
	note := ""
	if r.Note != "" {
		note = " (simulated)"
	}
	share := "all" // more than the bound is noise of the machine
	if best.RatioToBound < 1 {
		share = fmt.Sprintf("%.0f %%", 100*best.RatioToBound)
	}
	return fmt.Sprintf("Through ringbatch, %s, the same %d producers did %.1f times the work that they did each on its own, at %s of the latency, and %s of what the model can do at all%s.",
		how, r.Config.WorkerNum, best.ItemsPerS/each.ItemsPerS, fraction(best.Latency.Avg/each.Latency.Avg), share, note)
}

func fraction(v float64) string {
	if v < 0.67 {
		return fmt.Sprintf("1/%.0f", 1/v)
	}
	return fmt.Sprintf("%.1f times", v)
}
