// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"fmt"
	"time"

	"github.com/ringbatch/ringbatch/bench/rig"
	"github.com/ringbatch/ringbatch/internal/testbed"
)

const (
	growthClients = 256
	growthRate    = 2000 // requests per second, all clients together
)

// measureGrowth compares the CPU time per request with one attached client and with 256, at the same total rate. The clients
// share a process: then it is ringbatch that grows. 256 processes add the cost of 256 mostly sleeping Go runtimes; that is
// measured beside it.
func measureGrowth(r *rig.Rig) {
	var runs []*growthRun
	for _, g := range []*growthRun{{name: "one", sessions: 1, processes: 1}, {name: "many", sessions: growthClients, processes: 1},
		{name: "apart", sessions: 1, processes: growthClients}} {
		r.Say("growth: starting %d clients", g.sessions*g.processes)
		e := startEcho(r, 1, small64(g.name, 32, 4096))
		g.clients = startProducers(r, g.processes, producerJob{Socket: e.socket, Model: g.name, Window: 8, Sessions: g.sessions})
		g.serving = [][]*testbed.Process{{e.broker}, e.workers}
		runs = append(runs, g)
	}
	r.InTurns("growth", func(counts bool) {
		for _, g := range runs {
			g.round(r, 2*r.Round, counts)
		}
	})
	one, many, apart := runs[0], runs[1], runs[2]
	var ratios, processes []float64
	for i := range one.totals {
		ratios = append(ratios, many.totals[i]/one.totals[i])
		processes = append(processes, apart.totals[i]/one.totals[i])
	}
	r.Check("cpu_growth_ratio", rig.Median(ratios), "<", 1.20,
		"CPU per request at %d/s, %d clients in one process %s / 1 client %s; a process for each of %d: %s, ratio %.2f; median of %d rounds",
		growthRate, growthClients, many, one, growthClients, apart, rig.Median(processes), len(ratios))
}

// growthRun is one of the set-ups. Figures are CPU microseconds per request.
type growthRun struct {
	name                string
	sessions, processes int
	serving             [][]*testbed.Process // broker, workers
	clients             []*testbed.Process

	totals, pacing []float64
	parts          [3][]float64
}

// round measures once. The producers' cost of waking up in time is the load generator's, not a request's: it is measured by
// itself and taken off.
func (g *growthRun) round(r *rig.Rig, d time.Duration, counts bool) {
	o := order{Do: "pace only", Rate: growthRate / float64(len(g.clients))}
	pace := total(together(r, g.clients, o, d/2))
	pacing := float64(pace.CPU) / float64(max(pace.Requests, 1))
	before := r.CPUTimes(g.serving)
	o.Do = "paced"
	all := total(together(r, g.clients, o, d))
	after := r.CPUTimes(g.serving)
	if !counts {
		return
	}
	used := [3]float64{float64(after[0] - before[0]), float64(after[1] - before[1]), float64(all.CPU) - pacing*float64(all.Requests)}
	sum := 0.0
	for i := range g.parts {
		us := used[i] / 1e3 / float64(max(all.Requests, 1))
		g.parts[i] = append(g.parts[i], us)
		sum += us
	}
	g.totals, g.pacing = append(g.totals, sum), append(g.pacing, pacing/1e3)
}

// String is for the report.
func (g *growthRun) String() string {
	return fmt.Sprintf("%.1f µs (broker %.1f, worker %.1f, clients %.1f; not counted: %.1f for the pacing of the load)",
		rig.Median(g.totals), rig.Median(g.parts[0]), rig.Median(g.parts[1]), rig.Median(g.parts[2]), rig.Median(g.pacing))
}
