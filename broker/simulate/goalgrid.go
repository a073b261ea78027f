// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"context"
	"fmt"
	"io"
	"math"
	"strings"
	"time"

	"github.com/ringbatch/ringbatch/policy"
)

// The grid of goals: in every cell latency_goal is held against the fixed waits on the
// same arrivals, for a tight, a medium and a loose goal.

// goalWaits are the fixed waits: those of the other grids, and longer ones, which
// somebody who wants full batches would set; none is longer than the goal.
var goalWaits = append(gridWaits[:len(gridWaits):len(gridWaits)],
	30*time.Millisecond, 50*time.Millisecond, 75*time.Millisecond, 100*time.Millisecond, 150*time.Millisecond, 200*time.Millisecond, 300*time.Millisecond)

const (
	// goalBusy is how much longer workers may be busy than with the best fixed wait.
	goalBusy = 1.05
	// goalLate of the requests may be late, or refused, where a fixed wait keeps the goal.
	goalLate = 0.01
	// goalWork of the capacity must be done in time at twice the capacity.
	goalWork = 0.9
)

// GoalGridResult is what `simulate --grid=goal` prints with --json.
type GoalGridResult struct{ judged[GoalCellResult] }

// GoalCellResult is one goal in one cell.
type GoalCellResult struct {
	Name     string  `json:"name"`
	Goal     string  `json:"goal"` // tight, medium or loose
	GoalMS   float64 `json:"goal_ms"`
	Requests int     `json:"requests"`
	P99      float64 `json:"p99"`     // of what was answered, as a share of the goal
	Late     float64 `json:"late"`    // share of what was answered that took longer than the goal
	Refused  float64 `json:"refused"` // share of the requests
	// Where a fixed wait keeps the goal: the one with which workers are busy for the
	// least time, and for how many times as long they are with the goal, per request.
	BestWait string  `json:"best_wait,omitempty"`
	Busy     float64 `json:"busy,omitempty"`
	// Overload is whether more comes than can be done; Work is what is done in time
	// then, as a share of the capacity, where requests come all the time.
	Overload bool    `json:"overload"`
	Work     float64 `json:"work,omitempty"`
	Miss     string  `json:"miss,omitempty"` // what was not kept
}

// fixedWait is what became of a cell with a fixed wait.
type fixedWait struct {
	wait time.Duration
	p99  time.Duration
	busy float64 // per request
}

func busyPerRequest(r *Result) float64 {
	sum := 0.0
	for _, w := range r.Workers {
		sum += float64(w.Busy)
	}
	return sum / float64(max(1, r.Outcomes.Completed))
}

// goalsOf are a cell's goals: 1.3 × the least p99 of any fixed wait; four full
// batches; and one between. Under overload waits are endless without a goal, and it
// is two full batches, one that runs and the own one, at least.
func goalsOf(cfg *Config, overload bool, fixed []fixedWait) map[string]time.Duration {
	full := time.Duration(cfg.took(cfg.Policy.MaxBatchSize, cfg.Workers.Count-1))
	if overload {
		return map[string]time.Duration{"tight": 2 * full, "medium": 3 * full, "loose": 5 * full}
	}
	least := fixed[0].p99
	for _, f := range fixed {
		least = min(least, f.p99)
	}
	tight, loose := least*13/10, 4*full
	return map[string]time.Duration{"tight": tight, "loose": loose, "medium": time.Duration(math.Sqrt(float64(tight) * float64(loose)))}
}

// runGoalCell runs a cell with every goal. What looks like a miss is run again with
// four times the requests, other ones, before it counts, as in the other grids.
func runGoalCell(ctx context.Context, c gridCell) ([]GoalCellResult, error) {
	results, err := compareGoals(ctx, c, nil)
	if err != nil {
		return nil, err
	}
	misses := map[string]int{}
	for i := range results {
		if results[i].Miss != "" {
			misses[results[i].Goal] = i
		}
	}
	if len(misses) == 0 {
		return results, nil
	}
	c.cfg.Requests *= 4
	c.cfg.Seed += 1 << 32
	again, err := compareGoals(ctx, c, misses)
	if err != nil {
		return nil, err
	}
	for _, r := range again {
		results[misses[r.Goal]] = r
	}
	return results, nil
}

// compareGoals compares the goals that only names, or all.
func compareGoals(ctx context.Context, c gridCell, only map[string]int) (results []GoalCellResult, err error) {
	var fixed []fixedWait
	if !c.overload {
		if fixed, err = runFixed(ctx, c); err != nil {
			return nil, err
		}
	}
	goals := goalsOf(&c.cfg, c.overload, fixed)
	for _, name := range []string{"tight", "medium", "loose"} {
		if _, named := only[name]; only != nil && !named {
			continue
		}
		cfg := c.cfg
		cfg.Policy.WaitTime, cfg.Policy.LatencyGoal = policy.Auto, goals[name]
		r, err := Run(ctx, cfg)
		if err != nil {
			return nil, err
		}
		results = append(results, judgeGoal(&cfg, c, name, r, fixed))
	}
	return results, nil
}

func runFixed(ctx context.Context, c gridCell) (fixed []fixedWait, err error) {
	full := time.Duration(c.cfg.took(c.cfg.Policy.MaxBatchSize, c.cfg.Workers.Count-1))
	for _, wait := range goalWaits {
		if wait > 4*full {
			break // longer than any goal
		}
		cfg := c.cfg
		cfg.Policy.WaitTime = wait
		r, err := Run(ctx, cfg)
		if err != nil {
			return nil, err
		}
		fixed = append(fixed, fixedWait{wait, r.Latency.P99, busyPerRequest(r)})
	}
	return fixed, nil
}

func judgeGoal(cfg *Config, c gridCell, name string, r *Result, fixed []fixedWait) GoalCellResult {
	goal := cfg.Policy.LatencyGoal
	inTime := 0
	for inTime < len(r.latencies) && r.latencies[inTime] <= int64(goal) {
		inTime++
	}
	requests := float64(cfg.Requests)
	out := GoalCellResult{
		Name: c.name, Goal: name, GoalMS: milliseconds(goal), Requests: cfg.Requests, Overload: c.overload,
		P99:     float64(r.Latency.P99) / float64(goal),
		Late:    1 - float64(inTime)/float64(max(1, len(r.latencies))),
		Refused: float64(r.Outcomes.Refused) / requests,
	}
	best := -1
	for i, f := range fixed {
		if f.p99 <= goal && (best < 0 || f.busy < fixed[best].busy) {
			best = i
		}
	}
	var misses []string
	if best >= 0 {
		out.BestWait, out.Busy = fixed[best].wait.String(), busyPerRequest(r)/fixed[best].busy
		if 1-float64(inTime)/requests > goalLate {
			misses = append(misses, "late or refused")
		}
		if out.Busy > goalBusy {
			misses = append(misses, "busy")
		}
	} else if out.P99 > 1 {
		misses = append(misses, "p99")
	}
	if _, steady := cfg.Arrivals.(Poisson); steady && c.overload { // a queue that is kept short is empty soon after a burst
		if out.Work = float64(inTime) / r.Span.Seconds() / capacity(cfg); out.Work < goalWork {
			misses = append(misses, "work")
		}
	}
	out.Miss = strings.Join(misses, ", ")
	return out
}

func (c GoalCellResult) missed() bool { return c.Miss != "" }

// WriteText writes what holds, and a line for each cell that does not.
func (g *GoalGridResult) WriteText(w io.Writer) error {
	var b strings.Builder
	kept, overloaded, worst := 0, 0, GoalCellResult{Work: math.Inf(1)}
	for _, c := range g.Cells {
		if c.BestWait != "" {
			kept++
			worst.Busy = max(worst.Busy, c.Busy)
		}
		if c.Overload {
			overloaded++
			worst.P99 = max(worst.P99, c.P99)
			if c.Work > 0 {
				worst.Work = min(worst.Work, c.Work)
			}
		}
	}
	fmt.Fprintf(&b, "latency_goal in %d cells: %d do not hold\n", len(g.Cells), g.Misses)
	fmt.Fprintf(&b, "a fixed wait keeps the goal in %d: workers are busy at most %.3f × as long as with the best such wait; at most %g %% late or refused, and %.2f ×, hold\n", kept, worst.Busy, 100*goalLate, goalBusy)
	fmt.Fprintf(&b, "twice the capacity in %d: p99 of what is taken at most %.3f of the goal, work done in time at least %.3f of the capacity; 1 and %.2f hold\n", overloaded, worst.P99, worst.Work, goalWork)
	writeMisses(&b, "missed\tp99 / goal\tlate\trefused\tbusy\tbest wait\twork\tgoal\tcell", g.Cells, func(c GoalCellResult) string {
		return fmt.Sprintf("%s\t%.3f\t%.2f %%\t%.2f %%\t%.3f\t%s\t%.3f\t%s %.3g ms\t%s", c.Miss, c.P99, 100*c.Late, 100*c.Refused, c.Busy, c.BestWait, c.Work, c.Goal, c.GoalMS, c.Name)
	})
	_, err := io.WriteString(w, b.String())
	return err
}
