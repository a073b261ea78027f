// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"fmt"
	"time"

	"github.com/ringbatch/ringbatch/policy"
)

// A grid is many small simulations, the cells: every kind of model, load and
// number of workers. In each, wait_time "auto" is held against fixed waits on
// the same arrivals.

// gridWaits are the fixed waits that auto is held against.
var gridWaits = []time.Duration{
	0, 250 * time.Microsecond, 500 * time.Microsecond, time.Millisecond, 2 * time.Millisecond,
	5 * time.Millisecond, 10 * time.Millisecond, 20 * time.Millisecond,
}

// gridModel is a model by what its batches take.
type gridModel struct {
	name, cost string
}

// gridWorkers is how many serve it.
type gridWorkers struct {
	count   int
	sharing float64
}

// gridLoad is how requests come. share is of the capacity: what the workers
// could do in full batches.
type gridLoad struct {
	name  string
	share float64 // open loops
	on    time.Duration
	off   time.Duration

	clients  int // closed loops
	inFlight int
	think    float64 // in times of a batch of one
}

// gridPlan makes the cells.
type gridPlan struct {
	models  []gridModel
	workers []gridWorkers
	loads   []gridLoad
	batch   int // max_batch_size
}

// gridPlans are the grids that can be named. Auto was made with the first and the
// second; the others have other curves, loads and seeds, and check that it was not
// made to fit.
var gridPlans = map[string]gridPlan{
	"first": {
		batch: 32,
		models: []gridModel{
			{"near-linear", "1=1ms,32=20ms"},
			{"flat", "1=5ms,32=5.5ms"},
			{"resnet50-fp32", "1=3.3ms,32=8.2ms"},   // measured on an H200: docs/results/gpu.md
			{"resnet50-fp16", "1=1.42ms,32=1.87ms"}, // the same
			{"mlp-cpu", "1=60us,8=150us,32=420us"},  // measured on two cores
			{"steps", "1=2ms,8=2.1ms,9=4ms,16=4.1ms,17=8ms,32=8.2ms"},
			{"slow", "1=20ms,32=60ms"},
		},
		workers: []gridWorkers{{1, 0}, {3, 0}, {2, 0.8}, {4, 0.4}},
		loads: []gridLoad{
			{name: "poisson", share: 0.02}, {name: "poisson", share: 0.05}, {name: "poisson", share: 0.2},
			{name: "poisson", share: 0.5}, {name: "poisson", share: 0.8}, {name: "poisson", share: 0.95},
			{name: "bursty", share: 0.1, on: 20 * time.Millisecond, off: 60 * time.Millisecond},
			{name: "bursty", share: 0.4, on: 20 * time.Millisecond, off: 20 * time.Millisecond},
			{name: "on/off", share: 0.3, on: time.Second, off: time.Second},
			{name: "closed", clients: 6, inFlight: 1}, {name: "closed", clients: 48, inFlight: 1},
			{name: "closed", clients: 24, inFlight: 1, think: 1}, {name: "closed", clients: 12, inFlight: 2, think: 0.1},
		},
	},
	"second": {
		batch: 64,
		models: []gridModel{
			{"half", "1=4ms,64=60ms"},
			{"very flat", "1=8ms,64=8.1ms"},
			{"concave", "1=1ms,2=1.6ms,4=2.4ms,16=5ms,64=9ms"},
			{"convex", "1=3ms,16=4ms,32=8ms,64=24ms"},
			{"tiny", "1=30us,64=300us"},
			{"linear", "1=500us,64=32ms"},
		},
		workers: []gridWorkers{{1, 0}, {2, 0}, {4, 0}, {3, 0.5}},
		loads: []gridLoad{
			{name: "poisson", share: 0.03}, {name: "poisson", share: 0.1}, {name: "poisson", share: 0.35},
			{name: "poisson", share: 0.65}, {name: "poisson", share: 0.9},
			{name: "bursty", share: 0.2, on: 10 * time.Millisecond, off: 40 * time.Millisecond},
			{name: "bursty", share: 0.5, on: 50 * time.Millisecond, off: 50 * time.Millisecond},
			{name: "on/off", share: 0.2, on: 500 * time.Millisecond, off: 1500 * time.Millisecond},
			{name: "closed", clients: 16, inFlight: 1}, {name: "closed", clients: 128, inFlight: 1},
			{name: "closed", clients: 40, inFlight: 1, think: 3}, {name: "closed", clients: 10, inFlight: 4, think: 0.3},
		},
	}, "third": {
		batch: 16,
		models: []gridModel{
			{"medium", "1=2.5ms,16=6ms"},
			{"plateau", "1=3ms,4=3.1ms,8=6ms,16=6.2ms"},
			{"quick flat", "1=700us,16=800us"},
			{"steep", "1=2ms,16=24ms"},
		},
		workers: []gridWorkers{{1, 0}, {2, 0}, {3, 0.3}, {2, 0.6}},
		loads: []gridLoad{
			{name: "poisson", share: 0.04}, {name: "poisson", share: 0.15}, {name: "poisson", share: 0.3},
			{name: "poisson", share: 0.6}, {name: "poisson", share: 0.85},
			{name: "bursty", share: 0.25, on: 30 * time.Millisecond, off: 30 * time.Millisecond},
			{name: "on/off", share: 0.35, on: 700 * time.Millisecond, off: 700 * time.Millisecond},
			{name: "closed", clients: 8, inFlight: 1}, {name: "closed", clients: 32, inFlight: 1, think: 2},
			{name: "closed", clients: 6, inFlight: 3, think: 0.2},
		},
	},
	"fourth": {
		batch: 128,
		models: []gridModel{
			{"large", "1=6ms,32=10ms,128=30ms"},
			{"root", "1=1ms,4=2ms,16=4ms,64=8ms,128=11ms"},
			{"embedding", "1=200us,128=1.5ms"},
			{"heavy", "1=12ms,128=200ms"},
		},
		workers: []gridWorkers{{1, 0}, {3, 0}, {2, 0.9}, {4, 0.25}},
		loads: []gridLoad{
			{name: "poisson", share: 0.02}, {name: "poisson", share: 0.08}, {name: "poisson", share: 0.25},
			{name: "poisson", share: 0.55}, {name: "poisson", share: 0.75},
			{name: "bursty", share: 0.15, on: 15 * time.Millisecond, off: 45 * time.Millisecond},
			{name: "on/off", share: 0.4, on: 1200 * time.Millisecond, off: 800 * time.Millisecond},
			{name: "closed", clients: 20, inFlight: 1}, {name: "closed", clients: 60, inFlight: 1, think: 1.5},
			{name: "closed", clients: 16, inFlight: 4, think: 0.5},
		},
	},
	"goal": {
		batch: 32, models: goalModels, workers: goalWorkers,
		loads: []gridLoad{
			{name: "poisson", share: 0.05}, {name: "poisson", share: 0.2}, {name: "poisson", share: 0.5},
			{name: "poisson", share: 0.8}, {name: "poisson", share: 0.95}, {name: "poisson", share: 2},
			{name: "bursty", share: 0.2, on: 20 * time.Millisecond, off: 60 * time.Millisecond},
			{name: "bursty", share: 0.5, on: 20 * time.Millisecond, off: 20 * time.Millisecond},
			{name: "bursty", share: 2, on: 100 * time.Millisecond, off: 25 * time.Millisecond},
			{name: "closed", clients: 48, inFlight: 1}, {name: "closed", clients: 24, inFlight: 1, think: 1},
		},
	},
	"deadline": { // open loops: the same requests come whatever was refused
		batch: 32, models: goalModels, workers: goalWorkers,
		loads: []gridLoad{
			{name: "poisson", share: 0.05}, {name: "poisson", share: 0.5}, {name: "poisson", share: 0.8}, {name: "poisson", share: 0.95},
			{name: "poisson", share: 2}, {name: "bursty", share: 0.5, on: 20 * time.Millisecond, off: 20 * time.Millisecond},
		},
	},
}

// goalModels and goalWorkers are those of the grids of goals and deadlines.
var (
	goalModels = []gridModel{
		{"near-linear", "1=1ms,32=20ms"},
		{"flat", "1=5ms,32=5.5ms"},
		{"resnet50-fp32", "1=3.3ms,32=8.2ms"},
		{"mlp-cpu", "1=60us,8=150us,32=420us"},
		{"steps", "1=2ms,8=2.1ms,9=4ms,16=4.1ms,17=8ms,32=8.2ms"},
		{"slow", "1=20ms,32=60ms"},
	}
	goalWorkers = []gridWorkers{{1, 0}, {2, 0}, {4, 0}, {2, 0.8}, {3, 0.5}}
)

// gridCell is one cell: a Config but for the wait, and its name.
type gridCell struct {
	name     string
	cfg      Config
	overload bool // more comes than can be done
}

func (p *gridPlan) cells(requests int, seed uint64) (cells []gridCell, err error) {
	n := 0
	for _, m := range p.models {
		cost, err := ParseCost(m.cost)
		if err != nil {
			return nil, err
		}
		for _, w := range p.workers {
			for _, l := range p.loads {
				n++
				rows := 1
				if n%3 == 0 {
					rows = 4
				}
				cells = append(cells, p.cell(m, cost, w, l, rows, requests, seed+uint64(n)))
			}
		}
	}
	return cells, nil
}

func (p *gridPlan) cell(m gridModel, cost Cost, w gridWorkers, l gridLoad, rows, requests int, seed uint64) gridCell {
	cfg := Config{
		Policy:  policy.Settings{MaxBatchSize: p.batch},
		Load:    Load{MinRows: 1, MaxRows: rows},
		Workers: Workers{Count: w.count, Sharing: w.sharing},
		Cost:    cost, Hop: 7 * time.Microsecond, Requests: requests, Seed: seed,
	}
	name := fmt.Sprintf("%s, %d workers", m.name, w.count)
	if w.count == 1 {
		name = m.name + ", 1 worker"
	}
	if w.sharing > 0 {
		name += fmt.Sprintf(" sharing %g", w.sharing)
	}
	if rows > 1 {
		name += fmt.Sprintf(", 1-%d rows", rows)
	}
	if l.clients > 0 {
		think := time.Duration(l.think * float64(cost.Of(1)))
		cfg.Arrivals = ClosedLoop{Clients: l.clients, InFlight: l.inFlight, Think: think}
		name += fmt.Sprintf(", closed %d×%d think %v", l.clients, l.inFlight, think)
		return gridCell{name: name, cfg: cfg}
	}
	rate := l.share * capacity(&cfg)
	name += fmt.Sprintf(", %s %.3g %%", l.name, 100*l.share)
	if l.on == 0 {
		cfg.Arrivals = Poisson{Rate: rate}
	} else {
		cfg.Arrivals = Bursty{Rate: rate * float64(l.on+l.off) / float64(l.on), On: l.on, Off: l.off}
	}
	return gridCell{name, cfg, l.share > 1}
}

// capacity is the requests per second that the workers can do in full batches:
// with as many of them busy as do most together.
func capacity(cfg *Config) float64 {
	best := 0.0
	for k := 1; k <= cfg.Workers.Count; k++ {
		took := cfg.took(cfg.Policy.MaxBatchSize, k-1) / float64(time.Second)
		best = max(best, float64(k*cfg.Policy.MaxBatchSize)/took)
	}
	return best / (float64(max(1, cfg.Load.MinRows)+max(1, cfg.Load.MaxRows)) / 2)
}
