// SPDX-License-Identifier: Apache-2.0

package waits

import (
	"context"
	"fmt"
	"io"
	"math"
	"runtime"
	"strings"
	"sync/atomic"
	"text/tabwriter"
	"time"

	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/tools/simulate"
	"golang.org/x/sync/errgroup"
)

// Limits of a cell. A cell beyond its limit runs again, with four times the requests and
// other arrivals, and the second result counts: a short run varies by some per cent.
const (
	steadyLimit = 1.04 // mean, as a multiple of the best fixed wait's
	stepLimit   = 1.10
	lateLimit   = 0.01 // share of the requests that may miss a goal or a deadline
	workLimit   = 0.9  // share of the capacity that must be done in time under overload
)

// CellResult is one cell.
type CellResult struct {
	Kind     string  `json:"kind"`
	Name     string  `json:"name"`
	BestWait string  `json:"best_wait,omitempty"`
	Ratio    float64 `json:"ratio"` // steady, step: mean latency; goal: time of the workers; against the best fixed wait
	P99      float64 `json:"p99,omitempty"`
	Missed   string  `json:"missed,omitempty"` // the limit that was missed
}

// GridResult is the JSON of `bench waits`.
type GridResult struct {
	Seed    uint64        `json:"seed"`
	Summary []KindSummary `json:"summary"`
	Cells   []CellResult  `json:"cells"`
}

// KindSummary sums up the cells of a kind.
type KindSummary struct {
	Kind  string  `json:"kind"`
	Cells int     `json:"cells"`
	Mean  float64 `json:"geometric_mean"` // of Ratio
	P99   float64 `json:"p99_geometric_mean"`
	Kept  float64 `json:"kept"` // share of the cells within their limit
	Worst float64 `json:"worst"`
}

// runGridCells runs every cell, as many at a time as there are processors.
func runGridCells(ctx context.Context, cells []gridCell, progress func(done int)) ([]CellResult, error) {
	results := make([]CellResult, len(cells))
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(runtime.GOMAXPROCS(0))
	var done atomic.Int64
	for i, c := range cells {
		group.Go(func() (err error) {
			if results[i], err = c.run(ctx); err != nil {
				return fmt.Errorf("%s: %w", c.name, err)
			}
			progress(int(done.Add(1)))
			return nil
		})
	}
	return results, group.Wait()
}

func (c gridCell) run(ctx context.Context) (CellResult, error) {
	r, err := c.runOnce(ctx, 1)
	if err == nil && r.Missed != "" {
		c.cfg.Requests *= 4
		c.cfg.Seed += 1 << 32
		r, err = c.runOnce(ctx, 4)
	}
	r.Kind, r.Name = c.kind, c.name
	return r, err
}

func (c gridCell) runOnce(ctx context.Context, runs int) (CellResult, error) {
	switch c.kind {
	case "steady":
		return c.runSteady(ctx)
	case "step":
		return c.runStep(ctx, runs)
	case "goal":
		return c.runGoal(ctx)
	}
	return c.runDeadline(ctx)
}

func (c gridCell) runSteady(ctx context.Context) (out CellResult, err error) {
	best, wait, err := c.bestFixed(ctx, func(r *simulate.Result) float64 { return float64(r.Latency.Avg) })
	if err != nil {
		return out, err
	}
	auto, err := simulate.Run(ctx, c.auto())
	if err != nil {
		return out, err
	}
	out.BestWait = wait.String()
	out.Ratio = float64(auto.Latency.Avg) / float64(best.Latency.Avg)
	out.P99 = float64(auto.Latency.P99) / float64(best.Latency.P99)
	if out.Ratio > steadyLimit {
		out.Missed = "mean"
	}
	return out, nil
}

// bestFixed is the fixed wait with the least figure, and its result; nil if all are infinite.
func (c gridCell) bestFixed(ctx context.Context, figure func(*simulate.Result) float64) (best *simulate.Result, wait time.Duration, err error) {
	least := math.Inf(1)
	for _, w := range gridWaits {
		c.cfg.Policy.WaitTime = w
		r, err := simulate.Run(ctx, c.cfg)
		if err != nil {
			return nil, 0, err
		}
		if x := figure(r); x < least {
			best, wait, least = r, w, x
		}
	}
	return best, wait, nil
}

// runStep compares auto with the best wait after the step. A small load runs several times: a second of
// it has few requests.
func (c gridCell) runStep(ctx context.Context, runs int) (out CellResult, err error) {
	runs *= max(1, min(4, int(50_000/(simulate.Capacity(&c.cfg)*4))))
	mean := func(wait time.Duration) (sum float64, err error) {
		for i := range runs {
			cfg := c.cfg
			cfg.Policy.WaitTime = wait
			cfg.Seed += uint64(i)
			one, err := simulate.MeanBetween(ctx, cfg, stepFrom, stepTo)
			if err != nil {
				return 0, err
			}
			sum += one
		}
		return sum, nil
	}
	best := math.Inf(1)
	for _, wait := range gridWaits {
		sum, err := mean(wait)
		if err != nil {
			return out, err
		}
		if sum < best {
			best, out.BestWait = sum, wait.String()
		}
	}
	auto, err := mean(policy.Auto)
	if out.Ratio = auto / best; out.Ratio > stepLimit {
		out.Missed = "mean"
	}
	return out, err
}

// runGoal checks that latency_goal is kept: by nearly all requests if a fixed wait keeps it, else by
// nearly all accepted ones, and under overload these are enough.
func (c gridCell) runGoal(ctx context.Context) (out CellResult, err error) {
	goal := time.Duration(c.budget * simulate.FullBatch(&c.cfg))
	busy := func(r *simulate.Result) float64 {
		if r.Latency.P99 > goal {
			return math.Inf(1)
		}
		return busyPerRequest(r)
	}
	best, wait := (*simulate.Result)(nil), time.Duration(0)
	if !c.overload {
		if best, wait, err = c.bestFixed(ctx, busy); err != nil {
			return out, err
		}
	}
	cfg := c.auto()
	cfg.Policy.LatencyGoal = goal
	r, err := simulate.Run(ctx, cfg)
	if err != nil {
		return out, err
	}
	inTime := r.Within(goal)
	out.P99 = float64(r.Latency.P99) / float64(goal)
	switch {
	case best != nil:
		out.BestWait, out.Ratio = wait.String(), busyPerRequest(r)/busyPerRequest(best)
		if float64(inTime) < (1-lateLimit)*float64(cfg.Requests) {
			out.Missed = "late or refused"
		}
	case out.P99 > 1:
		out.Missed = "p99"
	case c.overload && float64(inTime)/r.Span.Seconds() < workLimit*simulate.Capacity(&cfg):
		out.Missed = "work"
	}
	return out, nil
}

func busyPerRequest(r *simulate.Result) float64 {
	sum := 0.0
	for _, w := range r.Workers {
		sum += float64(w.Busy)
	}
	return sum / float64(max(1, r.Outcomes.Completed))
}

// runDeadline checks that few accepted requests miss their deadline, and that nearly as many are in
// time as in the same run without refusals. Under overload refusals make room for others.
func (c gridCell) runDeadline(ctx context.Context) (out CellResult, err error) {
	cfg := c.auto()
	cfg.Load.Deadline = time.Duration(c.budget * simulate.FullBatch(&cfg))
	r, err := simulate.Run(ctx, cfg)
	if err != nil {
		return out, err
	}
	cfg.HideDeadlines = true
	anyway, err := simulate.Run(ctx, cfg)
	if err != nil {
		return out, err
	}
	few := lateLimit * float64(cfg.Requests)
	switch {
	case float64(r.Outcomes.Expired+r.Outcomes.Late) > few:
		out.Missed = "taken and missed"
	case float64(r.Outcomes.Completed) < float64(anyway.Outcomes.Completed)-few:
		out.Missed = "refused in vain"
	}
	return out, nil
}

func newGridResult(seed uint64, cells []CellResult) *GridResult {
	g := &GridResult{Seed: seed, Cells: cells}
	for _, kind := range gridKinds {
		s := KindSummary{Kind: kind}
		var ratios, p99s []float64
		kept := 0
		for _, c := range cells {
			if c.Kind != kind {
				continue
			}
			if s.Cells++; c.Missed == "" {
				kept++
			}
			s.Worst = max(s.Worst, c.Ratio)
			ratios, p99s = append(ratios, c.Ratio), append(p99s, c.P99)
		}
		s.Mean, s.P99 = geometricMean(ratios), geometricMean(p99s)
		s.Kept = float64(kept) / float64(max(1, s.Cells))
		g.Summary = append(g.Summary, s)
	}
	return g
}

// geometricMean leaves out zeros.
func geometricMean(list []float64) float64 {
	sum, n := 0.0, 0
	for _, x := range list {
		if x > 0 {
			sum, n = sum+math.Log(x), n+1
		}
	}
	return math.Exp(sum / float64(max(1, n)))
}

// WriteText writes a line for each kind, and one for each cell beyond its limit.
func (g *GridResult) WriteText(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "wait_time auto against the best of %d fixed waits, seed %d\n", len(gridWaits), g.Seed)
	for _, s := range g.Summary {
		fmt.Fprintf(&b, "%-9s %3d cells, %5.1f %% kept", s.Kind, s.Cells, 100*s.Kept)
		switch s.Kind {
		case "steady":
			fmt.Fprintf(&b, " (within %.2f ×): mean latency %.3f × (geometric mean), worst %.3f ×, p99 %.3f ×",
				steadyLimit, s.Mean, s.Worst, s.P99)
		case "step":
			fmt.Fprintf(&b, " (within %.2f ×): mean latency %.3f × from 1 to 2 s after it, worst %.3f ×", stepLimit, s.Mean, s.Worst)
		case "goal":
			fmt.Fprintf(&b, ": workers busy %.3f × as long as with the best fixed wait that keeps it", s.Mean)
		}
		b.WriteByte('\n')
	}
	t := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	for _, c := range g.Cells {
		if c.Missed != "" {
			fmt.Fprintf(t, "%s\t%s\t%.3f\t%s\t%s\n", c.Kind, c.Missed, c.Ratio, c.BestWait, c.Name)
		}
	}
	t.Flush()
	_, err := io.WriteString(w, b.String())
	return err
}
