// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"fmt"
	"io"
	"math"
	"slices"
	"strings"

	"github.com/ringbatch/ringbatch/internal/svgchart"
)

func number(x float64) string { return svgchart.Number(x) }

func (r *Report) goalText() string {
	text := "the most requests per second"
	if r.Goal.Rate > 0 {
		text = fmt.Sprintf("the least mean latency at %s requests/s", number(r.Goal.Rate))
	}
	if r.Goal.P99 > 0 {
		text += fmt.Sprintf(" with p99 within %v", r.Goal.P99)
	}
	return text
}

const barWidth = 16

// WriteText writes the table, a bar for what counts, and the recommendation.
func (r *Report) WriteText(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "%s: %s\n", r.Model, r.goalText())
	for _, p := range r.Profiles {
		if len(r.Candidates) > 0 {
			fmt.Fprintf(&b, "%s\n", p.Verdict())
		} else if err := p.WriteText(&b); err != nil { // nothing else was measured
			return err
		}
	}
	r.table(&b)
	for _, note := range r.Notes {
		fmt.Fprintf(&b, "note: %s\n", note)
	}
	if r.Unfinished {
		b.WriteString("interrupted: this is what was measured until then\n")
	}
	if r.Choice != nil {
		fmt.Fprintf(&b, "\nrecommended: %s (found in %.0f s, %d settings simulated)\nwhy: %s\n", r.Choice.sentence(), r.Seconds, len(r.Candidates), r.Why)
	}
	if g := r.Grid; g != nil {
		fmt.Fprintf(&b, "all %d settings measured in %.0f s: the best is %s; the choice is at %.1f %% of it and took %.0f %% of the time\n",
			g.Settings, g.Seconds, g.Best.sentence(), 100/g.Ratio, 100*r.Seconds/g.Seconds)
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// table lists the settings.
func (r *Report) table(b *strings.Builder) {
	if len(r.Candidates) == 0 {
		return
	}
	best := math.SmallestNonzeroFloat64
	for _, c := range r.Candidates {
		if c.Measured != nil {
			best = max(best, r.score(&c.Measured.Figures))
		}
	}
	mps := func(text string) string { // the column, if it was tried
		if !slices.ContainsFunc(r.Candidates, func(c *Candidate) bool { return c.MPS }) {
			return ""
		}
		return fmt.Sprintf(" %4s", text)
	}
	fmt.Fprintf(b, "\n%9s %6s%s  %27s %28s %24s %8s\n", "instances", "batch", mps("MPS"), "simulated: req/s, ms, p99", "measured: req/s (95 %)", "mean ms (95 %)", "p99 ms")
	for _, c := range r.Candidates {
		on, simulated := "", ""
		if c.MPS {
			on = "on"
		}
		if c.Predicted != nil {
			simulated = fmt.Sprintf("%s, %s, %s", number(c.Predicted.PerSecond), number(c.Predicted.MeanMS), number(c.Predicted.P99MS))
		}
		fmt.Fprintf(b, "%9d %6d%s  %27s", c.Instances, c.MaxBatchSize, mps(on), simulated)
		if m := c.Measured; m != nil {
			fmt.Fprintf(b, " %28s %24s %8s  %s", fmt.Sprintf("%s (%s … %s)", number(m.PerSecond), number(m.PerSecondLow), number(m.PerSecondHigh)),
				fmt.Sprintf("%s (%s … %s)", number(m.MeanMS), number(m.MeanLow), number(m.MeanHigh)), number(m.P99MS), strings.Repeat("█", int(r.score(&m.Figures)/best*barWidth+0.5)))
		}
		if r.Choice != nil && *r.Choice == c.Setting {
			b.WriteString("  ◄")
		}
		if c.Note != "" {
			b.WriteString("  " + c.Note)
		}
		b.WriteByte('\n')
	}
}

func (s Setting) sentence() string {
	text := fmt.Sprintf("%d instance(s), max_batch_size %d", s.Instances, s.MaxBatchSize)
	if s.MPS {
		text += ", with MPS"
	}
	return text
}

// Figure draws what was simulated, and what was measured, over the batch size.
func (r *Report) Figure() *svgchart.Figure {
	if len(r.Candidates) == 0 && len(r.Profiles) > 0 { // it was interrupted
		return r.Profiles[0].Figure()
	}
	c := svgchart.Chart{Title: "requests per second", XLabel: "max_batch_size", YLabel: "requests per second", XLog: r.logarithmic()}
	if r.Goal.Rate > 0 {
		c.Title, c.YLabel = "mean latency", "milliseconds"
	}
	value := func(f *Figures) float64 {
		if r.Goal.Rate > 0 {
			return f.MeanMS
		}
		return f.PerSecond
	}
	lines := map[string]*svgchart.Line{}
	var names []string
	line := func(name string, dashed bool) *svgchart.Line {
		if lines[name] == nil {
			lines[name] = &svgchart.Line{Name: name, Dashed: dashed, Points: !dashed}
			names = append(names, name)
		}
		return lines[name]
	}
	for _, x := range r.Candidates {
		name := fmt.Sprintf("%d", x.Instances)
		if x.MPS {
			name += " MPS"
		}
		if x.Predicted != nil {
			l := line(name, true)
			l.X, l.Y = append(l.X, float64(x.MaxBatchSize)), append(l.Y, value(x.Predicted))
		}
	}
	for _, x := range r.Candidates {
		m := x.Measured
		if m == nil {
			continue
		}
		l := line("measured "+x.Setting.String(), false)
		l.X, l.Y = append(l.X, float64(x.MaxBatchSize)), append(l.Y, value(&m.Figures))
		low, high := m.PerSecondLow, m.PerSecondHigh
		if r.Goal.Rate > 0 {
			low, high = m.MeanLow, m.MeanHigh
		}
		l.Low, l.High = append(l.Low, low), append(l.High, high)
	}
	for _, name := range names {
		c.Lines = append(c.Lines, *lines[name])
	}
	return &svgchart.Figure{Title: "ringbatch tune: " + r.Model, Subtitle: "for " + r.goalText() + "; dashed: simulated, by instances; points: measured, with 95 % intervals", Charts: []svgchart.Chart{c}}
}

// logarithmic is for several sizes.
func (r *Report) logarithmic() bool {
	return slices.ContainsFunc(r.Candidates, func(c *Candidate) bool { return c.MaxBatchSize != r.Candidates[0].MaxBatchSize })
}
