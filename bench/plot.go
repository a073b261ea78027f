// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"fmt"
	"os"

	"github.com/ringbatch/ringbatch/tools/svgchart"
)

func writePlot(path string, figure *svgchart.Figure) error {
	f, err := os.Create(path)
	if err != nil {
		return fmt.Errorf("--svg: %w", err)
	}
	if err := figure.Render(f); err != nil {
		f.Close()
		return fmt.Errorf("--svg: %w", err)
	}
	return f.Close()
}

// titled says in the title that a model is simulated.
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

// figure has the throughput beside the bound, the latencies and the breakdown.
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
		bars("throughput", "items per second", names, rates),
		bars("latency", "milliseconds", []string{"avg", "p50", "p90", "p95", "p99", "p99.9", "max"},
			[]float64{l.Avg, l.P50, l.P90, l.P95, l.P99, l.P999, l.Max}))
	if !c.NoDynamicBatch {
		each := r.Breakdown.each()
		f.Charts = append(f.Charts, bars("where the time went, average per request", "milliseconds", stageNames[:], each[:]))
	}
	return f
}

func bars(title, unit string, names []string, values []float64) svgchart.Chart {
	return svgchart.Chart{Title: title, YLabel: unit, Categories: names, Bars: []svgchart.Bars{{Y: values}}, BarLabels: true}
}

// figure has the demo's lines as bars, and the bound as a line.
func (r *demoReport) figure() *svgchart.Figure {
	n := r.Config.WorkerNum
	names := []string{"1 process\nalone", fmt.Sprintf("%d processes,\neach on its own", n),
		fmt.Sprintf("%d processes\nthrough ringbatch", n)}
	var rates, waits []float64
	for _, l := range r.Lines {
		rates, waits = append(rates, round(l.ItemsPerS)), append(waits, round(l.Latency.Avg))
	}
	names = names[:len(rates)]
	charts := []svgchart.Chart{bars("throughput", "items per second", names, rates), bars("latency", "milliseconds", names, waits)}
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
