// SPDX-License-Identifier: Apache-2.0

package svgchart

import (
	"math"
	"slices"
	"strings"
)

// area is the rectangle between the axes.
type area struct{ left, top, right, bottom float64 }

func (c *Chart) draw(p *page, a area) {
	p.text(a.left, a.top-24, c.Title, textStyle{size: 14, bold: true, anchor: start})
	y := c.drawYAxis(p, a)
	if len(c.Categories) > 0 {
		c.drawBars(p, a, y)
	}
	x := c.drawXAxis(p, a)
	c.drawLines(p, x, y)
	p.line(a.left, a.bottom, a.right, a.bottom, ink)
	p.line(a.left, a.top, a.left, a.bottom, ink)
	p.text((a.left+a.right)/2, a.bottom+40, c.XLabel, textStyle{size: 13, anchor: middle})
	p.text(a.left-60, (a.top+a.bottom)/2, c.YLabel, textStyle{size: 13, anchor: middle, upwards: true})
	c.drawLegend(p, a)
}

// yRange is the range of all values, with 0.
func (c *Chart) yRange() (lo, hi float64) {
	values := []float64{0}
	for _, l := range c.Lines {
		values = append(values, l.Y...)
	}
	for _, b := range c.Bars {
		values = append(values, b.Y...)
	}
	lo, hi = slices.Min(values), slices.Max(values)
	if c.BarLabels {
		hi *= 1.08 // room for the label of the highest bar
	}
	if c.YMax > 0 {
		hi = c.YMax
	}
	return lo, hi
}

func (c *Chart) drawYAxis(p *page, a area) scale {
	lo, hi := c.yRange()
	s := scale{from: a.bottom, to: a.top}
	var ticks []float64
	s.min, s.max, ticks = linear(lo, hi, 5)
	for _, t := range ticks {
		y := s.at(t)
		p.line(a.left, y, a.right, y, faint)
		p.text(a.left-8, y+4, format(c.YFormat, t), textStyle{size: 12, anchor: end})
	}
	return s
}

// drawXAxis draws categories or numbers below the axis, as many as have room.
func (c *Chart) drawXAxis(p *page, a area) scale {
	if n := len(c.Categories); n > 0 {
		s := c.categoryScale(a)
		longest := 1
		for _, name := range c.Categories {
			for line := range strings.Lines(name) {
				longest = max(longest, len([]rune(strings.TrimSpace(line))))
			}
		}
		room := (a.right - a.left) / (8*float64(longest) + 12)
		every := max(1, int(math.Ceil(float64(n)/room)))
		for i := 0; i < n; i += every {
			below := a.bottom + 18
			for line := range strings.Lines(c.Categories[i]) {
				p.text(s.at(float64(i)), below, strings.TrimSpace(line), textStyle{size: 12, anchor: middle})
				below += 15
			}
		}
		return s
	}
	var values []float64
	for _, l := range c.Lines {
		values = append(values, l.X...)
	}
	if len(values) == 0 {
		values = []float64{1, 2}
	}
	lo, hi := slices.Min(values), slices.Max(values)
	s := scale{from: a.left, to: a.right, logarithmic: c.XLog}
	var ticks []float64
	if c.XLog {
		s.min, s.max, ticks = logarithmic(lo, hi)
	} else {
		s.min, s.max, ticks = linear(lo, hi, 8)
	}
	for _, t := range ticks {
		x := s.at(t)
		p.line(x, a.top, x, a.bottom, faint)
		p.text(x, a.bottom+18, Number(t), textStyle{size: 12, anchor: middle})
	}
	return s
}

// categoryScale has category i at i, with half a category to spare at the ends.
func (c *Chart) categoryScale(a area) scale {
	return scale{min: -0.5, max: float64(len(c.Categories)) - 0.5, from: a.left, to: a.right}
}

func (c *Chart) drawBars(p *page, a area, y scale) {
	if len(c.Bars) == 0 {
		return
	}
	x := c.categoryScale(a)
	slot := (a.right - a.left) / float64(len(c.Categories))
	width := math.Min(0.8*slot, 120) / float64(len(c.Bars))
	base := y.at(math.Max(0, y.min))
	for k, b := range c.Bars {
		for i, value := range b.Y {
			left := x.at(float64(i)) + (float64(k)-float64(len(c.Bars))/2)*width
			top := math.Max(y.at(value), a.top)
			tip := strings.ReplaceAll(c.Categories[i], "\n", " ") + ": " + format(c.YFormat, value)
			if b.Name != "" {
				tip = b.Name + ", " + tip
			}
			p.rect(left, math.Min(top, base), math.Max(width-1, 0.5), math.Abs(base-top), colour(k), tip)
			if c.BarLabels {
				p.text(left+width/2, math.Min(top, base)-4, format(c.YFormat, value), textStyle{size: 11, anchor: middle})
			}
		}
	}
}

func (c *Chart) drawLines(p *page, x, y scale) {
	for k, l := range c.Lines {
		xs, ys := make([]float64, len(l.X)), make([]float64, len(l.X))
		for i := range l.X {
			xs[i], ys[i] = x.at(l.X[i]), y.at(l.Y[i])
		}
		p.polyline(xs, ys, colour(len(c.Bars)+k), l.Dashed)
	}
}

// drawLegend names the series above the axes, right-aligned, unless there is
// only one and it has no name.
func (c *Chart) drawLegend(p *page, a area) {
	var names []string
	for _, b := range c.Bars {
		names = append(names, b.Name)
	}
	for _, l := range c.Lines {
		names = append(names, l.Name)
	}
	x := a.right
	for i := len(names) - 1; i >= 0; i-- {
		if names[i] == "" {
			continue
		}
		x -= 7*float64(len([]rune(names[i]))) + 8
		p.text(x, a.top-8, names[i], textStyle{size: 12, anchor: start})
		p.rect(x-16, a.top-17, 11, 11, colour(i), "")
		x -= 28
	}
}

func colour(i int) string { return palette[i%len(palette)] }

func format(f func(float64) string, x float64) string {
	if f == nil {
		return Number(x)
	}
	return f(x)
}
