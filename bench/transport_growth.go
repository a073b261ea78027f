// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"fmt"
	"time"

	"github.com/ringbatch/ringbatch/internal/progress"
	"github.com/ringbatch/ringbatch/internal/testbed"
)

// growthFigures: CPU time per request with one attached client and with 256,
// at the same total rate. The clients share a process: then what grows is
// ringbatch. A process each adds what 256 mostly sleeping Go runtimes cost by
// themselves, with or without us; that is measured beside it.
type growthFigures struct {
	RatePerS       float64     `json:"rate_per_s"`
	One            growthPoint `json:"one"`
	Many           growthPoint `json:"many"`
	Rounds         []float64   `json:"rounds"`
	Processes      growthPoint `json:"processes"`
	ProcessesRatio float64     `json:"processes_ratio"`
}

// growthPoint is in CPU microseconds per request.
type growthPoint struct {
	Clients   int     `json:"clients"`
	Processes int     `json:"processes"`
	TotalUS   float64 `json:"total_us"`
	BrokerUS  float64 `json:"broker_us"`
	WorkerUS  float64 `json:"worker_us"`
	ClientUS  float64 `json:"client_us"`         // without the next
	PacingUS  float64 `json:"pacing_us"`         // the same processes waking up at the same times, sending nothing
	MedianUS  float64 `json:"median_latency_us"` // from the intended send time
}

const (
	growthClients = 256
	growthRate    = 2000 // requests per second, all clients together
)

func measureGrowth(f *fleet, o transportOptions, say *progress.Line, r *transportReport) error {
	fig := &growthFigures{RatePerS: growthRate}
	start := func(name string, clients, processes int) (growthRun, error) {
		say.Say("growth: starting %d clients", clients)
		g := growthRun{point: growthPoint{Clients: clients, Processes: processes}}
		e, err := f.startEcho(1, echoJob{Model: name, Inputs: []string{"x:u8[64]"}, Outputs: []string{"y:u8[64]"}, MaxBatch: 32, Slots: 4096})
		if err != nil {
			return g, err
		}
		g.clients, err = f.startTransport(processes, transportJob{Socket: e.socket, Model: name, Window: 8, Sessions: clients / processes})
		g.serving = [][]*testbed.Process{{e.broker}, e.workers}
		return g, err
	}
	one, err := start("one", 1, 1)
	if err != nil {
		return err
	}
	many, err := start("many", growthClients, 1)
	if err != nil {
		return err
	}
	apart, err := start("apart", growthClients, growthClients)
	if err != nil {
		return err
	}
	for round := range o.Rounds + 1 {
		say.Say("growth: round %d of %d", round+1, o.Rounds+1)
		for _, g := range []*growthRun{&one, &many, &apart} {
			if err := g.round(2*o.Round, round > 0); err != nil {
				return err
			}
		}
	}
	var processes []float64
	for i := range one.totals {
		fig.Rounds = append(fig.Rounds, many.totals[i]/one.totals[i])
		processes = append(processes, apart.totals[i]/one.totals[i])
	}
	fig.One, fig.Many, fig.Processes, fig.ProcessesRatio = one.result(), many.result(), apart.result(), medianOf(processes)
	r.Growth, r.CPUGrowthRatio = fig, medianOf(fig.Rounds)
	r.check("cpu_growth_ratio", r.CPUGrowthRatio, "< 1.20", r.CPUGrowthRatio < 1.20,
		"CPU per request at %d/s, %d clients in one process %s / 1 client %s; a process for each of %d: %s, ratio %.2f; median of %d rounds",
		growthRate, growthClients, fig.Many, fig.One, growthClients, fig.Processes, fig.ProcessesRatio, len(fig.Rounds))
	return nil
}

// String is for the report.
func (p growthPoint) String() string {
	return fmt.Sprintf("%.1f µs (broker %.1f, worker %.1f, clients %.1f; not counted: %.1f for the pacing of the load)", p.TotalUS, p.BrokerUS, p.WorkerUS, p.ClientUS, p.PacingUS)
}

// growthRun is one of the set-ups.
type growthRun struct {
	point   growthPoint
	serving [][]*testbed.Process // broker, workers
	clients []*testbed.Process

	totals, medians []float64
	parts           [3][]float64
	pacing          []float64
}

// round measures once. What the producers spend on waking up in time is the
// load generator's cost, not a request's: it is measured by itself and taken
// off.
func (g *growthRun) round(d time.Duration, counts bool) error {
	o := transportOrder{Do: "pace only", Rate: growthRate / float64(len(g.clients))}
	rs, err := together(g.clients, o, d/2)
	if err != nil {
		return err
	}
	pace := total(rs)
	pacing := float64(pace.CPU) / float64(max(pace.Requests, 1))
	before, err := groupTimes(g.serving)
	if err != nil {
		return err
	}
	o.Do = "paced"
	if rs, err = together(g.clients, o, d); err != nil {
		return err
	}
	after, err := groupTimes(g.serving)
	if err != nil || !counts {
		return err
	}
	all := total(rs)
	used := [3]float64{float64(after[0] - before[0]), float64(after[1] - before[1]), float64(all.CPU) - pacing*float64(all.Requests)}
	sum := 0.0
	for i := range g.parts {
		us := used[i] / 1e3 / float64(max(all.Requests, 1))
		g.parts[i] = append(g.parts[i], us)
		sum += us
	}
	g.totals, g.pacing = append(g.totals, sum), append(g.pacing, pacing/1e3)
	var lat []float64
	for _, r := range rs {
		if r.Requests > 0 {
			lat = append(lat, float64(r.Median)/1e3)
		}
	}
	g.medians = append(g.medians, median(lat))
	return nil
}

func (g *growthRun) result() growthPoint {
	p := g.point
	p.TotalUS, p.MedianUS = medianOf(g.totals), medianOf(g.medians)
	p.PacingUS = medianOf(g.pacing)
	p.BrokerUS, p.WorkerUS, p.ClientUS = medianOf(g.parts[0]), medianOf(g.parts[1]), medianOf(g.parts[2])
	return p
}
