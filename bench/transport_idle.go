// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"time"

	"github.com/ringbatch/ringbatch/internal/progress"
	"github.com/ringbatch/ringbatch/internal/testbed"
)

// idleFigures: a broker, 2 workers and 16 clients with nothing to do.
type idleFigures struct {
	Seconds   float64 `json:"seconds"`
	BrokerMS  float64 `json:"broker_ms"` // CPU time
	WorkersMS float64 `json:"workers_ms"`
	ClientsMS float64 `json:"clients_ms"`
}

const (
	idleWorkers = 2
	idleClients = 16
	idleSettle  = time.Second // after the last request
)

func measureIdle(f *fleet, o transportOptions, say *progress.Line, r *transportReport) error {
	say.Say("idle: starting %d clients", idleClients)
	e, err := f.startEcho(idleWorkers, echoJob{Model: "idle", Inputs: []string{"x:u8[64]"}, Outputs: []string{"y:u8[64]"}, MaxBatch: 32, WaitTime: time.Millisecond, Slots: 1024})
	if err != nil {
		return err
	}
	clients, err := f.startTransport(idleClients, transportJob{Socket: e.socket, Model: "idle", Window: 8, Sessions: 1})
	if err != nil {
		return err
	}
	if _, err := together(clients, transportOrder{Do: "latency", Count: 100}, 0); err != nil {
		return err
	}
	groups := [][]*testbed.Process{{e.broker}, e.workers, clients}
	if err := pause(f.Context(), idleSettle); err != nil {
		return err
	}
	before, err := groupTimes(groups)
	if err != nil {
		return err
	}
	start := time.Now()
	say.Say("idle: watching for %v", o.Idle)
	if err := pause(f.Context(), o.Idle); err != nil {
		return err
	}
	after, err := groupTimes(groups)
	if err != nil {
		return err
	}
	d := time.Since(start)
	used := func(i int) time.Duration { return after[i] - before[i] }
	r.Idle = &idleFigures{Seconds: d.Seconds(), BrokerMS: millis(used(0)), WorkersMS: millis(used(1)), ClientsMS: millis(used(2))}
	r.IdleCPUPercent = 100 * (used(0) + used(1) + used(2)).Seconds() / d.Seconds()
	r.check("idle_cpu_percent", r.IdleCPUPercent, "< 0.5", r.IdleCPUPercent < 0.5,
		"of one core in %.0f s: broker %.2f ms, %d workers %.2f ms, %d clients %.2f ms",
		d.Seconds(), millis(used(0)), idleWorkers, millis(used(1)), idleClients, millis(used(2)))
	return nil
}

func groupTimes(groups [][]*testbed.Process) ([]time.Duration, error) {
	sums := make([]time.Duration, len(groups))
	for i, g := range groups {
		group := cpuOf(g...)
		var err error
		if sums[i], err = group.time(); err != nil {
			return nil, err
		}
	}
	return sums, nil
}
