// SPDX-License-Identifier: Apache-2.0

// Package transport measures the cost of ringbatch itself, without a model.
package transport

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/spf13/pflag"

	"github.com/ringbatch/ringbatch/bench/rig"
	"github.com/ringbatch/ringbatch/internal/printable"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/test/testbed"
	"github.com/ringbatch/ringbatch/tools/load"
)

// Roles of this suite's processes.
func Roles() testbed.Roles {
	return testbed.Roles{
		"transport":     testbed.With(producerRole),
		"parts worker":  testbed.With(partsWorker),
		"parts reader":  testbed.With(partsReader),
		"idle models":   testbed.With(idleModelsRole),
		"futex ping":    futexPingRole,
		"futex pong":    futexPongRole,
		"socket server": testbed.With(socketServerRole),
		"socket client": socketClientRole,
	}
}

// Run is `bench transport`.
func Run(ctx context.Context, args []string, out io.Writer) error {
	var idle time.Duration
	s := rig.Suite{
		Name: "transport", About: "The cost of ringbatch itself, without a model; see docs/benchmark.md.", Rounds: 7, Round: time.Second,
		Flags: func(f *pflag.FlagSet) {
			f.DurationVar(&idle, "idle", 6*time.Second, "how long idleness is watched")
		},
		Parts: []rig.Part{
			{Name: "latency", Run: measureLatency}, {Name: "parts", Run: measureParts}, {Name: "small", Run: measureSmall}, {Name: "large", Run: measureLarge},
			{Name: "idle", Run: func(r *rig.Rig) { measureIdle(r, max(idle, 100*time.Millisecond)) }},
			{Name: "loops", Run: measureLoops},
		},
	}
	return s.Run(ctx, args, out)
}

// echo is a broker with echo workers, ready for producers.
type echo struct {
	broker  *testbed.Process
	workers []*testbed.Process
	socket  string
}

// small64 is a model of 64 bytes each way.
func small64(name string, maxBatch, slots int) rig.EchoJob {
	return rig.EchoJob{Model: name, In: "u8[64]", Out: "u8[64]", MaxBatch: maxBatch, Slots: slots}
}

func startEcho(r *rig.Rig, workers int, job rig.EchoJob) (e echo) {
	e.broker, e.socket = r.StartBroker(job.Model + ".sock")
	job.Socket = e.socket
	e.workers = r.MustStartAll(workers, func(int) testbed.Spec { return testbed.Spec{Role: "echo worker", Job: job, Procs: 2} })
	return e
}

// startProducers starts processes, each with its own session.
func startProducers(r *rig.Rig, n int, job producerJob) []*testbed.Process {
	return r.MustStartAll(n, func(i int) testbed.Spec {
		j := job
		j.Seed = uint64(i + 1)
		return testbed.Spec{Role: "transport", Job: j, Procs: 2}
	})
}

// together gives all producers the same order with a common start and end.
func together(r *rig.Rig, procs []*testbed.Process, o order, d time.Duration) []outcome {
	o.Start = shm.Now() + int64(load.LeadTime)
	o.Until = o.Start + int64(d)
	return rig.OrderAll[outcome](r, procs, o)
}

func total(rs []outcome) (sum outcome) {
	for _, r := range rs {
		sum.Requests += r.Requests
		sum.Bytes += r.Bytes
		sum.CPU += r.CPU
	}
	return sum
}

// measureIdle watches a broker, 2 workers and 16 clients that have nothing to do.
func measureIdle(r *rig.Rig, d time.Duration) {
	const workers, clients, settle = 2, 16, time.Second
	r.Say("idle: starting %d clients", clients)
	job := small64("idle", 32, 1024)
	job.WaitTime = time.Millisecond
	e := startEcho(r, workers, job)
	producers := startProducers(r, clients, producerJob{Socket: e.socket, Model: "idle", Window: 8})
	together(r, producers, order{Do: "latency", Count: 100}, 0)
	r.Must(load.Pause(r.Context(), settle))
	groups := [][]*testbed.Process{{e.broker}, e.workers, producers}
	before := r.CPUTimes(groups)
	r.Say("idle: watching for %v", d)
	start := time.Now()
	r.Must(load.Pause(r.Context(), d))
	after := r.CPUTimes(groups)
	var sum time.Duration
	var ms []any
	for i := range groups {
		sum += after[i] - before[i]
		ms = append(ms, float64(after[i]-before[i])/1e6)
	}
	percent := 100 * sum.Seconds() / time.Since(start).Seconds()
	r.Check("idle_cpu_percent", percent, "<", 0.5, "of one core in %v: broker %.2f ms, workers %.2f ms, clients %.2f ms", append([]any{d},
		ms...)...)
}

// measureLarge streams 602,112-byte inputs (an image of 3×224×224 floats) with 4 KB outputs, against the producers' own copies
// into the same slots.
func measureLarge(r *rig.Rig) {
	const bytes, producers, inFlight = 602112, 2, 32
	// Half of the requests in flight make a batch. Waiting for it costs nothing: the producers are copying meanwhile.
	e := startEcho(r, 1, rig.EchoJob{Model: "large", In: fmt.Sprintf("u8[%d]", bytes), Out: "u8[4096]",
		MaxBatch: producers * inFlight / 2, WaitTime: 2 * time.Millisecond, Slots: 2 * producers * inFlight})
	procs := startProducers(r, producers, producerJob{Socket: e.socket, Model: "large", Window: inFlight})
	var ratios []float64
	var rates [2][]float64
	r.InTurns("large", func(counts bool) {
		var moved [2]float64
		for i, do := range []string{"stream", "copy"} {
			rs := together(r, procs, order{Do: do}, r.Round)
			moved[i] = float64(total(rs).Bytes) / r.Round.Seconds()
			if counts {
				rates[i] = append(rates[i], moved[i])
			}
		}
		if counts {
			ratios = append(ratios, moved[0]/moved[1])
		}
	})
	through := rig.Median(rates[0])
	r.Check("large_ratio", rig.Median(ratios), ">=", 0.80,
		"%.2f GB/s through the whole exchange (%s requests/s) / %.2f GB/s of copies alone, %d producers × %d slots; median of %d rounds",
		through/1e9, printable.Number(through/bytes), rig.Median(rates[1])/1e9, producers, inFlight, len(ratios))
}
