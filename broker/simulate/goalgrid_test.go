// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"strings"
	"testing"
)

// Cells in which latency_goal was off by far: requests of several rows at twice the
// capacity; workers that share, and are seldom busy at once; clients who are refused
// and try again; a goal above the longest usual wait.
func TestALatencyGoalHoldsInCellsOfItsGrid(t *testing.T) {
	notShort(t)
	plan := gridPlans["goal"]
	cells, err := plan.cells(6000, 1)
	if err != nil {
		t.Fatal(err)
	}
	names := []string{
		"mlp-cpu, 1 worker, 1-4 rows, poisson 200 %",
		"steps, 2 workers sharing 0.8, poisson 5 %",
		"near-linear, 1 worker, closed 24×1 think 1ms",
		"slow, 3 workers sharing 0.5, poisson 5 %",
	}
	for _, c := range cellsNamed(t, cells, names...) {
		results, err := runGoalCell(t.Context(), c)
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range results {
			if r.Miss != "" {
				t.Errorf("%+v", r)
			}
		}
	}
}

// cellsNamed are the cells with these names, each of which there must be.
func cellsNamed(t *testing.T, cells []gridCell, names ...string) (some []gridCell) {
	t.Helper()
	for _, name := range names {
		before := len(some)
		for _, c := range cells {
			if c.name == name {
				some = append(some, c)
			}
		}
		if len(some) == before {
			t.Errorf("no cell is named %s", name)
		}
	}
	return some
}

func TestTheGridOfGoalsNamesTheCellsThatDoNotHold(t *testing.T) {
	g := GoalGridResult{judge(1, 100, [][]GoalCellResult{
		{{Name: "a", Goal: "tight", P99: 0.9, BestWait: "2ms", Busy: 1.01}, {Name: "b", Goal: "loose", P99: 0.5, BestWait: "5ms", Busy: 1.1, Miss: "busy"}},
		{{Name: "c", Goal: "tight", P99: 1.2, Overload: true, Work: 0.95, Miss: "p99"}},
	})}
	var out strings.Builder
	if err := g.WriteText(&out); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"in 3 cells: 2 do not hold", "at most 1.100 ×", "at most 1.200 of the goal", "at least 0.950", "loose"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("%q is not in:\n%s", want, out.String())
		}
	}
}
