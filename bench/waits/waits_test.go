// SPDX-License-Identifier: Apache-2.0

package waits

import (
	"strings"
	"testing"

	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/tools/simulate"
)

// A part of the grid that `bench waits` runs in full. A change that makes auto much
// worse fails here; the figures are in docs/results/batching.md.
func TestAShortGridIsNearTheBestFixedWaits(t *testing.T) {
	cells, err := gridCells(1, 0.03)
	must.Do(t, err)
	results, err := runGridCells(t.Context(), cells, func(int) {})
	must.Do(t, err)
	g := newGridResult(1, results)
	for _, s := range g.Summary {
		if s.Kept < 0.6 || s.Kind == "steady" && (s.Mean > 1 || s.Worst > 1.2) {
			t.Errorf("%+v", s)
		}
	}
	var text strings.Builder
	if err := g.WriteText(&text); err != nil || strings.Count(text.String(), "\n") < 5 {
		t.Errorf("%v\n%s", err, &text)
	}
}

// Where a fixed wait keeps p99 within the goal, auto does too, and leaves the workers as much time
// for others. At twice the capacity the accepted requests keep the goal.
func TestALatencyGoalIsKeptWithAsLittleWorkAsTheBestFixedWait(t *testing.T) {
	for share, goal := range map[float64]float64{0.05: 20, 0.5: 20, 2: 25} {
		cfg := simulate.Config{
			Policy:  policy.Settings{MaxBatchSize: 32, WaitTime: policy.Auto},
			Workers: simulate.Workers{Count: 2}, Hop: hop, Requests: 15_000, Seed: 5,
		}
		var err error
		cfg.Cost, err = simulate.ParseCost("1=3.3ms,32=8.2ms")
		must.Do(t, err)
		cfg.Arrivals = simulate.Poisson{Rate: share * simulate.Capacity(&cfg)}
		c := gridCell{kind: "goal", cfg: cfg, budget: goal / 8.2, overload: share > 1}
		r, err := c.run(t.Context())
		if err != nil || r.Missed != "" || r.Ratio > 1.05 || share < 1 && r.BestWait == "" {
			t.Errorf("at %v: %+v, %v", share, r, err)
		}
	}
}

func TestWaitsTakesFlagsOnly(t *testing.T) {
	if err := Run(t.Context(), []string{"more"}, &strings.Builder{}); err == nil || !strings.Contains(err.Error(), "takes flags only") {
		t.Error(err)
	}
}
