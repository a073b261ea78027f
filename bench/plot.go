// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"fmt"
	"os"

	"github.com/ringbatch/ringbatch/internal/svgchart"
)

// drawable is a report that can be drawn.
type drawable interface{ figure() *svgchart.Figure }

func writePlot(path string, d drawable) error {
	f, err := os.Create(path)
	if err != nil {
		return fmt.Errorf("--plot: %w", err)
	}
	if err := d.figure().Render(f); err != nil {
		f.Close()
		return fmt.Errorf("--plot: %w", err)
	}
	return f.Close()
}

// titled puts the note, such as "simulated", where nobody overlooks it.
func titled(title, note string) string {
	if note != "" {
		return title + " (simulated)"
	}
	return title
}

func subtitle(c *config, note string) string {
	s := fmt.Sprintf("model %s, %d model process(es), batches up to %d, wait %v", c.ModelType, c.ModelNum, c.MaxBatchSize, c.WaitTime)
	if note != "" {
		s += "; " + note
	}
	return s
}

// figure of one configuration: against the bound, percentiles, breakdown.
func (r *result) figure() *svgchart.Figure {
	c := r.Config
	f := &svgchart.Figure{Title: titled(fmt.Sprintf("ringbatch: %d producers, %s", c.WorkerNum, c.ModelType), r.Note),
		Subtitle: subtitle(c, r.Note)}
	rates, names := []float64{r.ItemsPerS}, []string{"measured"}
	if r.Bound != nil {
		rates, names = append(rates, r.Bound.ItemsPerS), append(names, "bound")
	}
	l := r.Latency
	f.Charts = append(f.Charts,
		svgchart.Chart{Title: "throughput", YLabel: "items per second", Categories: names, Bars: []svgchart.Bars{{Y: rates}}, BarLabels: true},
		svgchart.Chart{Title: "latency", YLabel: "milliseconds", Categories: []string{"avg", "p50", "p90", "p95", "p99", "p99.9", "max"},
			Bars: []svgchart.Bars{{Y: []float64{l.Avg, l.P50, l.P90, l.P95, l.P99, l.P999, l.Max}}}, BarLabels: true})
	if !c.NoDynamicBatch {
		each := r.Breakdown.each()
		f.Charts = append(f.Charts, svgchart.Chart{Title: "where the time went, average per request", YLabel: "milliseconds",
			Categories: stageNames[:], Bars: []svgchart.Bars{{Y: each[:]}}, BarLabels: true})
	}
	return f
}

// figure of a sweep: throughput and latency over concurrency.
func (s *sweep) figure() *svgchart.Figure {
	var x, items, p50, p95, p99, bound []float64
	for _, p := range s.Points {
		x, items = append(x, float64(p.Concurrency)), append(items, p.ItemsPerS)
		p50, p95, p99 = append(p50, p.Latency.P50), append(p95, p.Latency.P95), append(p99, p.Latency.P99)
		if s.Bound != nil {
			bound = append(bound, s.Bound.ItemsPerS)
		}
	}
	rate := []svgchart.Line{{Name: "ringbatch", X: x, Y: items, Points: true}}
	if s.Bound != nil {
		rate = append(rate, svgchart.Line{Name: "bound", X: x, Y: bound, Dashed: true})
	}
	return &svgchart.Figure{
		Title: titled("ringbatch: throughput and latency over concurrency", s.Note), Subtitle: subtitle(s.Config, s.Note),
		Charts: []svgchart.Chart{
			{Title: "throughput", XLabel: "producers", YLabel: "items per second", Lines: rate},
			{Title: "latency", XLabel: "producers", YLabel: "milliseconds", Lines: []svgchart.Line{
				{Name: "p50", X: x, Y: p50, Points: true}, {Name: "p95", X: x, Y: p95, Points: true}, {Name: "p99", X: x, Y: p99, Points: true}}},
		},
	}
}

// figure of the demo: its lines as bars, under the bound.
func (r *demoReport) figure() *svgchart.Figure {
	n := r.Config.WorkerNum
	names := []string{"1 process\nalone", fmt.Sprintf("%d processes,\neach on its own", n), fmt.Sprintf("%d processes\nthrough ringbatch", n)}
	var rates, waits []float64
	for _, l := range r.Lines {
		rates, waits = append(rates, round(l.ItemsPerS)), append(waits, round(l.Latency.Avg))
	}
	charts := []svgchart.Chart{
		{Title: "throughput", YLabel: "items per second", Categories: names[:len(rates)], Bars: []svgchart.Bars{{Y: rates}}, BarLabels: true},
		{Title: "latency", YLabel: "milliseconds", Categories: names[:len(rates)], Bars: []svgchart.Bars{{Y: waits}}, BarLabels: true},
	}
	if len(r.Lines) == demoLines && r.Lines[demoBatched].Bound != nil {
		rate := round(r.Lines[demoBatched].Bound.ItemsPerS)
		charts[0].Lines = []svgchart.Line{{Name: "what the model can do: full batches, no callers", Dashed: true, X: []float64{-0.5,
			demoLines - 0.5}, Y: []float64{rate, rate}}}
	}
	return &svgchart.Figure{
		Title:    titled(fmt.Sprintf("One model, %d processes with one item each at a time", n), r.Note),
		Subtitle: subtitle(r.Config, r.Note),
		Charts:   charts,
	}
}
