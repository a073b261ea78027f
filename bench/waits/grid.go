// SPDX-License-Identifier: Apache-2.0

package waits

import (
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/tools/simulate"
)

// The grid is many small simulations, the cells, drawn by a seed. It compares wait_time "auto" with
// fixed waits.
//
//	steady     a load that stays; mean latency against the best fixed wait
//	step       load or cost changes by a factor of ten; the same, from 1 to 2 s after it
//	goal       latency_goal; requests answered in time, against the best fixed wait
//	deadline   requests with deadlines; against the same run without refusals

// gridSizes is how many cells of each kind a grid has.
var gridSizes = map[string]int{"steady": 200, "step": 60, "goal": 60, "deadline": 60}

// gridKinds is their order.
var gridKinds = []string{"steady", "step", "goal", "deadline"}

// gridWaits are the fixed waits.
var gridWaits = []time.Duration{
	0, 250 * time.Microsecond, 500 * time.Microsecond, time.Millisecond, 2 * time.Millisecond,
	5 * time.Millisecond, 10 * time.Millisecond, 20 * time.Millisecond,
}

const (
	gridRequests = 20_000 // of a cell that is not a step
	hop          = 7 * time.Microsecond
	// leastStepCapacity, in requests per second: a twentieth of it must fill a second.
	leastStepCapacity = 3000
)

// gridCell is one cell: a simulate.Config but for the wait, and its name.
type gridCell struct {
	kind, name string
	cfg        simulate.Config
	budget     float64 // of goals and deadlines: in full batches
	overload   bool    // more comes than can be done
}

// gridCells draws the cells, a part of each kind.
func gridCells(seed uint64, part float64) (cells []gridCell, err error) {
	for k, kind := range gridKinds {
		d := draw{rand.New(rand.NewPCG(seed, uint64(k)))}
		for range int(part * float64(gridSizes[kind])) {
			c, err := d.cell(kind)
			for err == nil && kind == "step" && simulate.Capacity(&c.cfg) < leastStepCapacity {
				c, err = d.cell(kind)
			}
			if err != nil {
				return nil, err
			}
			cells = append(cells, c)
		}
	}
	return cells, nil
}

// draw is a source of chance.
type draw struct{ *rand.Rand }

func (d draw) cell(kind string) (c gridCell, err error) {
	c.kind = kind
	cfg := simulate.Config{Hop: hop, Requests: gridRequests, Seed: d.Uint64() >> 1}
	cfg.Policy.MaxBatchSize = 8 << d.IntN(5)
	quickest := 30e3
	if kind == "step" { // or a second has too many requests
		cfg.Policy.MaxBatchSize, quickest = 8<<d.IntN(3), 500e3
	}
	cfg.Load = simulate.Load{MinRows: 1, MaxRows: 1}
	if d.IntN(3) == 0 {
		cfg.Load.MaxRows = 4
	}
	if cfg.Cost, err = simulate.ParseCost(d.cost(cfg.Policy.MaxBatchSize, quickest)); err != nil {
		return c, err
	}
	cfg.Workers.Count = 1 + d.IntN(4)
	if cfg.Workers.Count > 1 && d.IntN(2) == 0 {
		cfg.Workers.Sharing = float64(1+d.IntN(10)) / 10
	}
	load := ""
	switch kind {
	case "steady":
		cfg.Arrivals, load = d.steady(&cfg)
	case "step":
		cfg.Arrivals, cfg.Phases, load = d.step(&cfg)
	default:
		share := []float64{0.05, 0.2, 0.5, 0.8, 0.95, 2}[d.IntN(6)]
		c.budget = d.between(1.5, 4)
		c.overload = share > 1
		cfg.Arrivals, load = simulate.Poisson{Rate: share * simulate.Capacity(&cfg)}, fmt.Sprintf("poisson %g %%, %.2g full batches", 100*share, c.budget)
	}
	c.cfg = cfg
	c.name = fmt.Sprintf("%s of %d, %d workers sharing %g, up to %d rows, %s",
		cfg.Cost, cfg.Policy.MaxBatchSize, cfg.Workers.Count, cfg.Workers.Sharing, cfg.Load.MaxRows, load)
	return c, nil
}

// between is a number between two, each of its magnitudes as likely.
func (d draw) between(low, high float64) float64 { return low * math.Pow(high/low, d.Float64()) }

// cost is of a model that takes some time for a batch, and some for its rows: the same for each, or
// more for the first ones, or for the last.
func (d draw) cost(batch int, quickest float64) string {
	one, share, bend := d.between(quickest, 20e6), d.between(0.001, 1), d.between(0.5, 1.3)
	points := []string{}
	for rows := 1; rows <= batch; rows *= 2 {
		took := time.Duration(one * (1 - share + share*math.Pow(float64(rows), bend)))
		points = append(points, fmt.Sprintf("%d=%v", rows, took.Round(time.Microsecond)))
	}
	return strings.Join(points, ",")
}

// steady is a simulate.Poisson load, bursts, long pauses, or a closed loop.
func (d draw) steady(cfg *simulate.Config) (simulate.Arrivals, string) {
	share := d.between(0.02, 0.95)
	rate := share * simulate.Capacity(cfg)
	on, off := d.between(5e6, 100e6), d.between(5e6, 200e6)
	switch d.IntN(10) {
	case 0:
		on, off = d.between(300e6, 2e9), d.between(300e6, 2e9)
		fallthrough
	case 1, 2:
		a := simulate.Bursty{Rate: rate, On: time.Duration(on), Off: time.Duration(off)}
		return a, fmt.Sprintf("%.2g %% for %v, off for %v", 100*share, a.On, a.Off)
	case 3, 4, 5:
		a := simulate.ClosedLoop{Clients: int(d.between(2, float64(4*cfg.Policy.MaxBatchSize))), InFlight: 1}
		if d.IntN(3) == 0 {
			a.InFlight = 2 + d.IntN(3)
		}
		if d.IntN(2) == 0 {
			a.Think = time.Duration(d.between(0.1, 4) * float64(cfg.Cost.Of(1)))
		}
		return a, fmt.Sprintf("%d clients with %d in flight, think %v", a.Clients, a.InFlight, a.Think)
	}
	return simulate.Poisson{Rate: rate}, fmt.Sprintf("poisson %.2g %%", 100*share)
}

// Times of a step.
const (
	stepAt   = 2 * time.Second
	stepFrom = stepAt + time.Second // what counts
	stepTo   = stepFrom + time.Second
)

// step is a step of load or cost by ten, up or down: simulate.Poisson, bursty or, for costs, closed.
func (d draw) step(cfg *simulate.Config) (simulate.Arrivals, []simulate.Phase, string) {
	phase, name := simulate.Phase{From: stepAt, Rate: 1, Cost: 1}, "load"
	by, share := 10.0, d.between(0.03, 0.085)
	if d.IntN(2) == 0 {
		by, share = 0.1, d.between(0.3, 0.85)
	}
	if phase.Rate = by; d.IntN(2) == 0 {
		phase.Rate, phase.Cost, name = 1, by, "cost"
	}
	name = fmt.Sprintf("%.2g %%, %s × %g", 100*share, name, by)
	rate := share * simulate.Capacity(cfg)
	switch kind := d.IntN(3); {
	case kind == 0: // half of it: at more only the queue of a burst counts
		on, off := 20*time.Millisecond, 60*time.Millisecond
		return simulate.Bursty{Rate: rate / 2 * float64(on+off) / float64(on), On: on, Off: off}, []simulate.Phase{phase}, "bursty " + name
	case kind == 1 && phase.Rate == 1:
		return simulate.ClosedLoop{Clients: 12 * cfg.Workers.Count, Think: cfg.Cost.Of(1)}, []simulate.Phase{phase}, "closed, " + name
	}
	return simulate.Poisson{Rate: rate}, []simulate.Phase{phase}, "poisson " + name
}

// auto is the cell with wait_time auto.
func (c *gridCell) auto() simulate.Config {
	cfg := c.cfg
	cfg.Policy.WaitTime = policy.Auto
	return cfg
}
