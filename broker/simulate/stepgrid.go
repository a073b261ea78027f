// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"context"
	"fmt"
	"io"
	"math"
	"strings"
	"time"

	"github.com/ringbatch/ringbatch/broker/batcher"
	"github.com/ringbatch/ringbatch/policy"
)

// The grid of steps: in the middle of a run the load, or what batches take, becomes ten
// times as much, or a tenth. From one second later on wait_time auto is held against the
// fixed wait that is best there.

const (
	stepAt     = 2 * time.Second
	stepJudged = stepAt + time.Second // from here
	stepEnd    = stepAt + 2*time.Second
	// stepMean is what auto must keep: its mean as a multiple of the best fixed wait's.
	stepMean = 1.05
	// stepRuns is how often a cell runs, each time with other arrivals: a second of a small
	// load has a few hundred requests only. What looks like a miss runs again, stepAgain times.
	stepRuns  = 8
	stepAgain = 32
	// stepRequests is more than come in a run.
	stepRequests = 1 << 19
)

// stepPlan makes the cells.
type stepPlan struct {
	batch   int
	models  []stepModel
	workers []gridWorkers
	steps   []step
	on, off time.Duration // of bursts
	clients int           // of closed loops, for each worker
}

type stepModel struct {
	name string
	cost string
	busy string // beside other workers, if that was measured
}

// step is a change of load or of cost.
type step struct {
	load float64 // before it, as a share of the capacity
	rate float64 // times as many requests after it
	cost float64 // times as long batches after it
}

// what changes, by how much.
func (s step) String() string {
	what, by := "load", s.rate
	if s.rate == 1 {
		what, by = "cost", s.cost
	}
	if by < 1 {
		return fmt.Sprintf("%s /%.3g", what, 1/by)
	}
	return fmt.Sprintf("%s ×%.3g", what, by)
}

var tenfoldSteps = stepPlan{
	batch: 32,
	models: []stepModel{
		{"resnet50", "1=1.15ms,4=1.6ms,32=8ms", "1=1.3ms,4=1.9ms,32=15.4ms"},
		{name: "flat", cost: "1=5ms,32=5.5ms"},
		{name: "near-linear", cost: "1=1ms,32=20ms"},
		{name: "resnet50-fp16", cost: "1=1.42ms,32=1.87ms"},
		{name: "steps", cost: "1=2ms,8=2.1ms,9=4ms,16=4.1ms,17=8ms,32=8.2ms"},
	},
	workers: []gridWorkers{{1, 0}, {2, 0.8}, {3, 0}},
	steps: []step{
		{0.08, 10, 1}, {0.8, 0.1, 1}, {0.04, 10, 1}, {0.5, 0.1, 1},
		{0.08, 1, 10}, {0.8, 1, 0.1}, {0.04, 1, 10}, {0.4, 1, 0.1},
	},
	on: 20 * time.Millisecond, off: 60 * time.Millisecond,
	clients: 12,
}

func (p *stepPlan) cells(seed uint64) (cells []gridCell, err error) {
	names := map[string]bool{}
	for _, m := range p.models {
		for _, w := range p.workers {
			cfg := Config{
				Policy:  policy.Settings{MaxBatchSize: p.batch},
				Workers: Workers{Count: w.count, Sharing: w.sharing},
				Hop:     7 * time.Microsecond,
			}
			if cfg.Cost, err = ParseCost(m.cost); err != nil {
				return nil, err
			}
			if m.busy != "" && w.count > 1 {
				cost, err := ParseCost(m.busy)
				if err != nil {
					return nil, err
				}
				cfg.Busy, cfg.Workers.Sharing = []Cost{cost}, 0
			}
			think := time.Duration(cfg.took(1, 0))
			closed := ClosedLoop{Clients: p.clients * w.count, InFlight: 1, Think: think}
			for _, s := range p.steps {
				rate, after := s.load*capacity(&cfg), 100*s.load*s.rate*s.cost
				for _, arrivals := range []struct {
					name string
					Arrivals
				}{
					{fmt.Sprintf("poisson %g→%.3g %%", 100*s.load, after), Poisson{Rate: rate}},
					// Half of it: at more the queue of a burst is all that counts.
					{fmt.Sprintf("bursty %g→%.3g %%", 50*s.load, after/2), Bursty{Rate: rate / 2 * float64(p.on+p.off) / float64(p.on), On: p.on, Off: p.off}},
					{"closed", closed},
				} {
					name := fmt.Sprintf("%s, %d workers, %s, %v", m.name, w.count, arrivals.name, s)
					if arrivals.name == "closed" { // its load is what the clients make it
						if s.rate != 1 || names[name] {
							continue
						}
						names[name] = true
					}
					c := gridCell{name: name, cfg: cfg}
					c.cfg.Arrivals = arrivals.Arrivals
					c.cfg.Phases = []Phase{{From: stepAt, Rate: s.rate, Cost: s.cost}}
					c.cfg.Seed = seed + uint64(len(cells))<<16
					cells = append(cells, c)
				}
			}
		}
	}
	return cells, nil
}

// StepGridResult is what `simulate --grid=steps` prints with --json.
type StepGridResult struct {
	Seed   uint64           `json:"seed"`
	Cells  []StepCellResult `json:"cells"`
	Misses int              `json:"misses"`
	Worst  float64          `json:"worst_mean"`
}

// StepCellResult is one cell.
type StepCellResult struct {
	Name     string  `json:"name"`
	Runs     int     `json:"runs"`
	BestWait string  `json:"best_wait"`
	BestMS   float64 `json:"best_mean_ms"`
	AutoMS   float64 `json:"auto_mean_ms"`
	Mean     float64 `json:"mean"`     // of auto, as a multiple of the best fixed wait's
	Interval float64 `json:"interval"` // of that, 95 %: plus or minus
	Miss     bool    `json:"miss"`
}

func (c StepCellResult) missed() bool { return c.Miss }

func runStepCell(ctx context.Context, c gridCell) (StepCellResult, error) {
	r, err := compareAfterStep(ctx, c, stepRuns)
	if err == nil && r.Miss {
		c.cfg.Seed += 1 << 32
		r, err = compareAfterStep(ctx, c, stepAgain)
	}
	return r, err
}

// compareAfterStep runs a cell so many times with every wait.
func compareAfterStep(ctx context.Context, c gridCell, runs int) (out StepCellResult, err error) {
	means := func(wait time.Duration) (each []float64, sum float64, err error) {
		for i := range runs {
			cfg := c.cfg
			cfg.Seed += uint64(i)
			mean, err := meanBetween(ctx, cfg, wait, stepJudged, stepEnd)
			if err != nil {
				return nil, 0, err
			}
			each = append(each, mean)
			sum += mean
		}
		return each, sum, nil
	}
	var best []float64
	least := math.Inf(1)
	for _, wait := range gridWaits {
		each, sum, err := means(wait)
		if err != nil {
			return out, err
		}
		if sum < least {
			best, least, out.BestWait = each, sum, wait.String()
		}
	}
	auto, sum, err := means(policy.Auto)
	if err != nil {
		return out, err
	}
	out.Name, out.Runs = c.name, runs
	out.BestMS, out.AutoMS = least/float64(runs)/1e6, sum/float64(runs)/1e6
	out.Mean = sum / least
	out.Interval = ratioInterval(auto, best)
	out.Miss = out.Mean > stepMean
	return out, nil
}

// ratioInterval is half the 95 % interval of sum a / sum b, from pairs.
func ratioInterval(a, b []float64) float64 {
	sumA, sumB, squares := 0.0, 0.0, 0.0
	for i := range a {
		sumA, sumB = sumA+a[i], sumB+b[i]
	}
	for i := range a {
		rest := a[i] - sumA/sumB*b[i]
		squares += rest * rest
	}
	n := float64(len(a))
	return 1.96 * math.Sqrt(squares*n/(n-1)) / sumB
}

// meanBetween is the mean latency of requests that were committed in a part of the
// run, which ends after it; in nanoseconds.
func meanBetween(ctx context.Context, cfg Config, wait, from, to time.Duration) (float64, error) {
	cfg.Policy.WaitTime = wait
	cfg.Requests = stepRequests
	if err := cfg.validate(); err != nil {
		return 0, err
	}
	w, err := newWorld(cfg)
	if err != nil {
		return 0, err
	}
	sum, n, over := 0.0, 0, false
	w.answered = func(committed, answered batcher.Time) {
		if committed >= batcher.Time(from) && committed < batcher.Time(to) {
			sum += float64(answered - committed)
			n++
		}
		if committed >= batcher.Time(to) {
			over = true
			w.scheduled = cfg.Requests // no more
		}
	}
	if err := w.run(ctx); err != nil {
		return 0, err
	}
	if !over || n == 0 {
		return 0, fmt.Errorf("%d requests do not last for %v", cfg.Requests, to)
	}
	return sum / float64(n), nil
}

func newStepGridResult(seed uint64, cells []StepCellResult) *StepGridResult {
	g := &StepGridResult{Seed: seed, Cells: cells}
	for _, c := range cells {
		if c.Miss {
			g.Misses++
		}
		g.Worst = max(g.Worst, c.Mean)
	}
	return g
}

// WriteText writes a line for the whole and one for each miss.
func (g *StepGridResult) WriteText(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "wait_time auto from 1 to 2 s after a step, against the best of %d fixed waits there, in %d cells: mean at most %.3f ×; %d above %.2f ×\n",
		len(gridWaits), len(g.Cells), g.Worst, g.Misses, stepMean)
	writeMisses(&b, "mean\t95 %\tbest wait\tcell", g.Cells, func(c StepCellResult) string {
		return fmt.Sprintf("%.3f\t± %.3f\t%s\t%s", c.Mean, c.Interval, c.BestWait, c.Name)
	})
	_, err := io.WriteString(w, b.String())
	return err
}
