// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"context"
	"fmt"
	"io"
	"runtime"
	"slices"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/ringbatch/ringbatch/policy"
)

// What auto must keep in every cell: its latency as a multiple of that of the
// fixed wait with the best mean.
const (
	gridMean = 1.03
	gridP99  = 1.10
)

// GridResult is what `simulate --grid` prints with --json.
type GridResult struct {
	Grid     string       `json:"grid"`
	Seed     uint64       `json:"seed"`
	Requests int          `json:"requests_per_cell"`
	Cells    []CellResult `json:"cells"`
	Misses   int          `json:"misses"`
	Worst    struct {
		Mean float64 `json:"mean"`
		P99  float64 `json:"p99"`
	} `json:"worst"`
	Fixed []FixedResult `json:"fixed"` // how one fixed wait does over the whole grid
}

// CellResult is one cell.
type CellResult struct {
	Name     string    `json:"name"`
	Requests int       `json:"requests"`
	BestWait string    `json:"best_wait"`
	Mean     float64   `json:"mean"` // of auto, as a multiple of the best fixed wait's
	P99      float64   `json:"p99"`
	AutoMS   float64   `json:"auto_mean_ms"`
	AutoP99  float64   `json:"auto_p99_ms"`
	FixedMS  []float64 `json:"fixed_mean_ms"` // by gridWaits
	Miss     bool      `json:"miss"`
}

// FixedResult is how far a fixed wait is from the best one.
type FixedResult struct {
	Wait  string  `json:"wait"`
	Worst float64 `json:"worst_mean"` // multiple of the best fixed wait's mean, in the worst cell
}

// runCells runs every cell, as many at a time as there are processors.
func runCells[R any](ctx context.Context, cells []gridCell, run func(context.Context, gridCell) (R, error), progress func(done int)) ([]R, error) {
	results := make([]R, len(cells))
	var mu sync.Mutex
	var wg sync.WaitGroup
	var firstErr error
	next, done := 0, 0
	for range runtime.GOMAXPROCS(0) {
		wg.Go(func() {
			for {
				mu.Lock()
				i := next
				next++
				stop := firstErr != nil || i >= len(cells)
				mu.Unlock()
				if stop {
					return
				}
				r, err := run(ctx, cells[i])
				mu.Lock()
				if err != nil && firstErr == nil {
					firstErr = fmt.Errorf("%s: %w", cells[i].name, err)
				}
				results[i] = r
				done++
				progress(done)
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	return results, firstErr
}

// runCell runs a cell. What looks like a miss is run again with four times the
// requests, other ones, before it counts: 3 % are little beside the noise of a
// short run.
func runCell(ctx context.Context, c gridCell) (CellResult, error) {
	r, err := compare(ctx, c)
	if err == nil && r.Miss {
		c.cfg.Requests *= 4
		c.cfg.Seed += 1 << 32
		r, err = compare(ctx, c)
	}
	return r, err
}

func compare(ctx context.Context, c gridCell) (CellResult, error) {
	out := CellResult{Name: c.name, Requests: c.cfg.Requests}
	run := func(wait time.Duration) (*Result, error) {
		cfg := c.cfg
		cfg.Policy.WaitTime = wait
		return Run(ctx, cfg)
	}
	var best *Result
	for _, wait := range gridWaits {
		r, err := run(wait)
		if err != nil {
			return out, err
		}
		if best == nil || r.Latency.Avg < best.Latency.Avg {
			best, out.BestWait = r, wait.String()
		}
		out.FixedMS = append(out.FixedMS, milliseconds(r.Latency.Avg))
	}
	auto, err := run(policy.Auto)
	if err != nil {
		return out, err
	}
	out.AutoMS, out.AutoP99 = milliseconds(auto.Latency.Avg), milliseconds(auto.Latency.P99)
	out.Mean = float64(auto.Latency.Avg) / float64(best.Latency.Avg)
	out.P99 = float64(auto.Latency.P99) / float64(best.Latency.P99)
	out.Miss = out.Mean > gridMean || out.P99 > gridP99
	return out, nil
}

func newGridResult(name string, seed uint64, requests int, cells []CellResult) *GridResult {
	g := &GridResult{Grid: name, Seed: seed, Requests: requests, Cells: cells}
	for i, wait := range gridWaits {
		f := FixedResult{Wait: wait.String()}
		for _, c := range cells {
			f.Worst = max(f.Worst, c.FixedMS[i]/slices.Min(c.FixedMS))
		}
		g.Fixed = append(g.Fixed, f)
	}
	for _, c := range cells {
		if c.Miss {
			g.Misses++
		}
		g.Worst.Mean = max(g.Worst.Mean, c.Mean)
		g.Worst.P99 = max(g.Worst.P99, c.P99)
	}
	return g
}

// judged is what the grids of goals and of deadlines print: cells, and how many of them
// do not hold.
type judged[C interface{ missed() bool }] struct {
	Seed     uint64 `json:"seed"`
	Requests int    `json:"requests_per_cell"`
	Cells    []C    `json:"cells"`
	Misses   int    `json:"misses"`
}

func judge[C interface{ missed() bool }](seed uint64, requests int, cells [][]C) judged[C] {
	g := judged[C]{Seed: seed, Requests: requests, Cells: slices.Concat(cells...)}
	for _, c := range g.Cells {
		if c.missed() {
			g.Misses++
		}
	}
	return g
}

// writeMisses writes a table of the cells that do not hold, if there are any.
func writeMisses[C interface{ missed() bool }](w io.Writer, heads string, cells []C, line func(C) string) {
	if !slices.ContainsFunc(cells, C.missed) {
		return
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintf(t, "\n%s\n", heads)
	for _, c := range cells {
		if c.missed() {
			fmt.Fprintln(t, line(c))
		}
	}
	t.Flush()
}

func (c CellResult) missed() bool { return c.Miss }

// WriteText writes a line for the whole and one for each miss.
func (g *GridResult) WriteText(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "wait_time auto against the best of %d fixed waits in %d cells: mean at most %.3f ×, p99 at most %.3f ×; %d above %.2f × or %.2f ×\n",
		len(gridWaits), len(g.Cells), g.Worst.Mean, g.Worst.P99, g.Misses, gridMean, gridP99)
	b.WriteString("one fixed wait for all cells, mean in its worst cell:")
	for _, f := range g.Fixed {
		fmt.Fprintf(&b, "  %s %.2f ×", f.Wait, f.Worst)
	}
	b.WriteString("\n")
	writeMisses(&b, "mean\tp99\tbest wait\tcell", g.Cells, func(c CellResult) string {
		return fmt.Sprintf("%.3f\t%.3f\t%s\t%s", c.Mean, c.P99, c.BestWait, c.Name)
	})
	_, err := io.WriteString(w, b.String())
	return err
}
