// SPDX-License-Identifier: Apache-2.0

package svgchart

import (
	"encoding/xml"
	"errors"
	"io"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/ringbatch/ringbatch/internal/must"
)

func render(t *testing.T, f Figure) string {
	t.Helper()
	var b strings.Builder
	must.Do(t, f.Render(&b))
	return b.String()
}

func TestAFigureIsWellFormedAndSaysWhatItShows(t *testing.T) {
	svg := render(t, Figure{
		Title: "a < b & c", Subtitle: "made by hand",
		Charts: []Chart{
			{Title: "lines", XLabel: "latency (ms)", YLabel: "share", XLog: true, YMax: 1, YFormat: Percent,
				Lines: []Line{
					{Name: "one", X: []float64{1, 10, 100}, Y: []float64{0, 0.5, 1}},
					{Name: "two", X: []float64{2}, Y: []float64{1}, Dashed: true},
				}},
			{Title: "bars", XLabel: "size", YLabel: "batches", Categories: []string{"1", "2"}, BarLabels: true,
				Bars: []Bars{{Name: "A", Y: []float64{3, 12500}}, {Name: "B", Y: []float64{1, 2}}}},
			{Title: "empty"},
		},
	})
	d := xml.NewDecoder(strings.NewReader(svg))
	for {
		_, err := d.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatalf("not well-formed: %v", err)
		}
	}
	for _, want := range []string{"a &lt; b &amp; c", "made by hand", "latency (ms)", "share", "100 %", "12,500", ">one<", ">B<",
		"stroke-dasharray", "<title>A, 2: 12,500</title>"} {
		if !strings.Contains(svg, want) {
			t.Errorf("does not contain %q", want)
		}
	}
	if strings.Contains(svg, "NaN") || strings.Contains(svg, "Inf") {
		t.Error("has coordinates that are no numbers")
	}
}

func TestWhatCannotBeDrawnIsAnError(t *testing.T) {
	for _, c := range []Chart{
		{Lines: []Line{{X: []float64{1}, Y: nil}}},
		{Lines: []Line{{X: []float64{math.NaN()}, Y: []float64{1}}}},
		{Lines: []Line{{X: []float64{0}, Y: []float64{1}}}, XLog: true},
		{Categories: []string{"a"}, Bars: []Bars{{Y: []float64{1, 2}}}},
		{Categories: []string{"a"}, Bars: []Bars{{Y: []float64{math.Inf(1)}}}},
	} {
		f := Figure{Charts: []Chart{c}}
		if err := f.Render(io.Discard); err == nil {
			t.Errorf("%+v was drawn", c)
		}
	}
}

func TestAxesEndAtRoundNumbers(t *testing.T) {
	lo, hi, ticks := linear(0, 37, 5)
	if lo != 0 || hi != 40 || !slices.Equal(ticks, []float64{0, 10, 20, 30, 40}) {
		t.Errorf("0..37: %v..%v %v", lo, hi, ticks)
	}
	lo, hi, ticks = logarithmic(3.3, 180)
	if lo != 2 || hi != 200 || !slices.Equal(ticks, []float64{2, 5, 10, 20, 50, 100, 200}) {
		t.Errorf("3.3..180: %v..%v %v", lo, hi, ticks)
	}
	lo, hi, ticks = logarithmic(0.001, 100)
	if lo != 0.001 || hi != 100 || len(ticks) != 6 {
		t.Errorf("0.001..100: %v..%v %v", lo, hi, ticks)
	}
	if lo, hi, _ := logarithmic(5, 5); lo > 5 || hi < 5 || lo == hi {
		t.Errorf("5..5: %v..%v", lo, hi)
	}
}

func TestNumbersAreShortAndReadable(t *testing.T) {
	for x, want := range map[float64]string{0: "0", 0.001: "0.001", 0.25: "0.25", 3: "3", 12.5: "12.5", 99.99: "100", 12500: "12,500",
		-1234567: "-1,234,567"} {
		if got := Number(x); got != want {
			t.Errorf("Number(%v) is %s, want %s", x, got, want)
		}
	}
}

func TestACategoryMayHaveTwoLines(t *testing.T) {
	var out strings.Builder
	f := Figure{Charts: []Chart{{Categories: []string{"first\nsecond"}, Bars: []Bars{{Y: []float64{1}}}}}}
	must.Do(t, f.Render(&out))
	for _, want := range []string{">first</text>", ">second</text>", "<title>first second: 1</title>"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in the drawing", want)
		}
	}
}
