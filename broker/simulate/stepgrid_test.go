// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"strings"
	"testing"
)

// Cells in which auto was at 1.08 to 1.35 of the best wait: batch times of sizes that were
// not seen since the step stayed what they were, or what was replayed was of before it.
func TestAutoIsBackInCellsOfTheGridOfSteps(t *testing.T) {
	notShort(t)
	cells, err := tenfoldSteps.cells(1)
	if err != nil {
		t.Fatal(err)
	}
	names := []string{
		"steps, 2 workers, bursty 20→2 %, cost /10",
		"steps, 3 workers, closed, cost /10",
		"resnet50, 2 workers, bursty 40→4 %, load /10",
		"steps, 2 workers, bursty 40→4 %, load /10",
		"flat, 3 workers, poisson 8→80 %, cost ×10",
	}
	for _, c := range cellsNamed(t, cells, names...) {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r, err := compareAfterStep(t.Context(), c, 4)
			if err != nil {
				t.Fatal(err)
			}
			if r.Miss {
				t.Errorf("%+v", r)
			}
		})
	}
}

func TestTheGridOfStepsNamesTheCellsThatDoNotHold(t *testing.T) {
	g := newStepGridResult(1, []StepCellResult{{Name: "a", Mean: 1.01}, {Name: "b", Mean: 1.2, Interval: 0.03, BestWait: "5ms", Miss: true}})
	var out strings.Builder
	if err := g.WriteText(&out); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"in 2 cells: mean at most 1.200 ×; 1 above 1.05 ×", "1.200  ± 0.030  5ms        b"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("%q is not in:\n%s", want, out.String())
		}
	}
	if strings.Contains(out.String(), " a\n") {
		t.Errorf("it names a cell that holds:\n%s", out.String())
	}
}
