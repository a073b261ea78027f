// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"strings"
	"testing"
)

// With time for one and a half full batches at twice the capacity nearly all that was
// taken was late: others joined its batch until it took too long.
func TestOthersThatJoinABatchCountForItsDeadline(t *testing.T) {
	notShort(t)
	plan := gridPlans["deadline"]
	cells, err := plan.cells(8000, 1)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range cellsNamed(t, cells, "near-linear, 1 worker, poisson 200 %") {
		results, err := runDeadlineCell(t.Context(), c)
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range results {
			if r.InTime < 0.35 || r.InTime < r.InTimeAnyway {
				t.Errorf("%+v", r)
			}
		}
	}
}

func TestTheGridOfDeadlinesNamesTheCellsThatDoNotHold(t *testing.T) {
	g := DeadlineGridResult{judge(1, 100, [][]DeadlineCellResult{
		{{Name: "a", InTime: 1, InTimeAnyway: 0.9}, {Name: "b", InTime: 0.5, InTimeAnyway: 0.4, Expired: 0.03, Late: 0.02, RefusedInVain: 0.01, Miss: "taken and missed"}},
	})}
	var out strings.Builder
	if err := g.WriteText(&out); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"in 2 cells: 1 do not hold", "at most 3.00 % expired", "2.00 % were computed too late", "+10.00 % more"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("%q is not in:\n%s", want, out.String())
		}
	}
}
