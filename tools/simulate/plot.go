// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"fmt"
	"io"

	"github.com/ringbatch/ringbatch/tools/svgchart"
)

// WriteSVG draws the distribution of latencies and of batch sizes.
func (r *Result) WriteSVG(w io.Writer, cfg *Config) error {
	figure := svgchart.Figure{
		Title:    "Simulated: " + cfg.Arrivals.String(),
		Subtitle: cfg.describe(),
		Charts:   []svgchart.Chart{r.latencyChart(), r.sizeChart()},
	}
	return figure.Render(w)
}

// latencyChart is the cumulative distribution, with lines at p50 and p99.
func (r *Result) latencyChart() svgchart.Chart {
	c := svgchart.Chart{
		Title:  fmt.Sprintf("Latency at %s requests/s", svgchart.Number(r.RequestsPerSecond)),
		XLabel: "latency from commit to answer (ms)",
		YLabel: "share of requests",
		XLog:   true, YMax: 1, YFormat: svgchart.Percent,
	}
	if len(r.latencies) == 0 {
		return c
	}
	curve := svgchart.Line{Name: "cumulative"}
	const steps = 400
	for i := range steps + 1 {
		q := float64(i) / steps
		curve.X = append(curve.X, max(milliseconds(r.Quantile(q)), 1e-6))
		curve.Y = append(curve.Y, q)
	}
	c.Lines = append(c.Lines, curve)
	for _, mark := range []struct {
		name string
		q    float64
	}{{"p50", 0.5}, {"p99", 0.99}, {"p99.9", 0.999}} {
		x := max(milliseconds(r.Quantile(mark.q)), 1e-6)
		c.Lines = append(c.Lines, svgchart.Line{
			Name: fmt.Sprintf("%s %s ms", mark.name, svgchart.Number(x)),
			X:    []float64{x, x}, Y: []float64{0, mark.q}, Dashed: true,
		})
	}
	return c
}

// sizeChart shows how large batches are, and in which sizes the rows travel.
func (r *Result) sizeChart() svgchart.Chart {
	c := svgchart.Chart{
		Title:  fmt.Sprintf("Batch sizes, %.1f rows on average", r.MeanBatchRows),
		XLabel: "rows in the batch",
		YLabel: "share",
		Bars:   []svgchart.Bars{{Name: "of batches"}, {Name: "of rows"}},
		// Shares of both kinds; the axis grows with the larger.
		YFormat: svgchart.Percent,
	}
	rows := r.MeanBatchRows * float64(r.Batches)
	for _, x := range sizeBins(r.BatchSizes, 48) {
		c.Categories = append(c.Categories, x.label)
		c.Bars[0].Y = append(c.Bars[0].Y, float64(x.n)/float64(r.Batches))
		c.Bars[1].Y = append(c.Bars[1].Y, float64(x.rows)/rows)
	}
	return c
}
