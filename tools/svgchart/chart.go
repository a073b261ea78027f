// SPDX-License-Identifier: Apache-2.0

// Package svgchart draws line and bar charts as SVG for browsers and READMEs: axes with
// units, a legend, a title, no script, no font to load. For more, export the numbers.
//
//	figure := svgchart.Figure{
//		Title: "ResNet-50, 128 producers",
//		Charts: []svgchart.Chart{{
//			Title: "throughput", XLabel: "workers", YLabel: "images per second",
//			Categories: []string{"1", "2", "3"},
//			Bars:       []svgchart.Bars{{Name: "measured", Y: []float64{3800, 5200, 5900}}},
//		}},
//	}
//	err := figure.Render(w)
package svgchart

import (
	"fmt"
	"io"
	"math"
)

// Figure is one SVG: a title above charts that are drawn below each other.
type Figure struct {
	Title    string
	Subtitle string // one line of small print: how the figure was made
	Charts   []Chart
}

// Chart is one pair of axes, with Lines over numbers or Bars over Categories.
// Lines may be drawn over bars: category i is then at x = i.
type Chart struct {
	Title          string
	XLabel, YLabel string // with the unit: "latency (ms)"

	Lines []Line
	XLog  bool // logarithmic x axis; x must be positive

	Categories []string // a newline makes two lines of a label
	Bars       []Bars   // groups side by side; each has one Y per category

	// YMax, if positive, is where the y axis ends, for example 1 for a share.
	YMax float64
	// YFormat writes the numbers at the y axis; nil means Number.
	YFormat func(float64) string
	// BarLabels writes the value above each bar.
	BarLabels bool
}

// Line is a curve through points, x ascending.
type Line struct {
	Name   string
	X, Y   []float64
	Dashed bool // for bounds and targets
}

// Bars is one series of bars.
type Bars struct {
	Name string
	Y    []float64
}

// Colours that colour-blind people can distinguish (Okabe and Ito).
var palette = []string{"#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#7f7f7f"}

const (
	ink       = "#222222"
	faint     = "#dddddd"
	marginL   = 78.0
	marginR   = 24.0
	marginTop = 44.0 // chart title and legend
	marginBot = 56.0 // tick labels and axis label

	chartHeight = 320.0
)

// Render writes the figure. It fails if x and y of a series differ in length, or if a
// number cannot be drawn.
func (f *Figure) Render(w io.Writer) error {
	const width = 860.0
	top := 16.0
	if f.Title != "" {
		top += 28
	}
	if f.Subtitle != "" {
		top += 20
	}
	height := top
	for i := range f.Charts {
		if err := f.Charts[i].check(); err != nil {
			return fmt.Errorf("draw chart %q: %w", f.Charts[i].Title, err)
		}
		height += chartHeight
	}
	p := newPage(width, height)
	if f.Title != "" {
		p.text(width/2, 30, f.Title, textStyle{size: 18, bold: true, anchor: middle})
	}
	if f.Subtitle != "" {
		p.text(width/2, 50, f.Subtitle, textStyle{size: 12, anchor: middle, colour: "#555555"})
	}
	for i := range f.Charts {
		c := &f.Charts[i]
		c.draw(p, area{marginL, top + marginTop, width - marginR, top + chartHeight - marginBot})
		top += chartHeight
	}
	return p.writeTo(w)
}

func (c *Chart) check() error {
	for _, l := range c.Lines {
		if len(l.X) != len(l.Y) {
			return fmt.Errorf("line %q has %d x and %d y", l.Name, len(l.X), len(l.Y))
		}
		for i := range l.X {
			if !drawable(l.X[i], c.XLog) || !drawable(l.Y[i], false) {
				return fmt.Errorf("line %q has a point at (%g, %g)", l.Name, l.X[i], l.Y[i])
			}
		}
	}
	for _, b := range c.Bars {
		if len(b.Y) != len(c.Categories) {
			return fmt.Errorf("bars %q have %d values for %d categories", b.Name, len(b.Y), len(c.Categories))
		}
		for _, y := range b.Y {
			if !drawable(y, false) {
				return fmt.Errorf("bars %q have a value of %g", b.Name, y)
			}
		}
	}
	return nil
}

func drawable(x float64, logarithmic bool) bool {
	return !math.IsNaN(x) && !math.IsInf(x, 0) && (!logarithmic || x > 0)
}
