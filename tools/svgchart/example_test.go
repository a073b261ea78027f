// SPDX-License-Identifier: Apache-2.0

package svgchart_test

import (
	"fmt"
	"strings"

	"github.com/ringbatch/ringbatch/tools/svgchart"
)

// Two series of bars with their values, and a bound drawn over them.
func Example() {
	figure := svgchart.Figure{
		Title:    "Throughput of 128 producers",
		Subtitle: "made-up figures",
		Charts: []svgchart.Chart{{
			XLabel: "workers", YLabel: "images per second",
			Categories: []string{"1", "2", "3"},
			Bars: []svgchart.Bars{
				{Name: "ours", Y: []float64{3800, 5200, 5900}},
				{Name: "theirs", Y: []float64{1500, 2100, 2500}},
			},
			Lines: []svgchart.Line{
				{Name: "what the device gives", X: []float64{0, 1, 2}, Y: []float64{3891, 5297, 5978}, Dashed: true},
			},
			BarLabels: true,
		}},
	}
	var svg strings.Builder
	err := figure.Render(&svg)
	fmt.Println(err, strings.Count(svg.String(), "<rect"), "rectangles")
	// Output: <nil> 10 rectangles
}
