// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"fmt"
	"runtime"

	"github.com/ringbatch/ringbatch/bench/rig"
	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/internal/attach"
	"github.com/ringbatch/ringbatch/internal/control"
	"github.com/ringbatch/ringbatch/internal/printable"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/test/testbed"
)

const (
	loopsModels = 4
	loopsRate   = 2000 // requests per second of the model whose p99 counts
	loopsIdle   = 1000 // models that do nothing

	// Four models at their limit take four loops, four workers, and producers. With fewer cores the figure is the machine's.
	loopsCores = 16
)

// measureLoops measures the cost that models of one broker have for one another. One of the broker's loops serves each model.
func measureLoops(r *rig.Rig) {
	fourModels(r)
	idleModels(r)
}

// compareLoops measures two things in turns and reports the second divided by the first.
func compareLoops(r *rig.Rig, name, op string, aim float64, behind string, first, second func() float64) {
	var a, b, ratios []float64
	r.InTurns("loops: "+name, func(counts bool) {
		if x, y := first(), second(); counts {
			a, b, ratios = append(a, x), append(b, y), append(ratios, y/x)
		}
	})
	behind = fmt.Sprintf("%s %s / %s, %d loops; median of %d rounds", behind, printable.Number(rig.Median(b)), printable.Number(rig.Median(a)),
		broker.DefaultLoops(), len(ratios))
	if runtime.NumCPU() < loopsCores {
		op, behind = "", behind+fmt.Sprintf("; not judged: %d cores, of %d that it takes", runtime.NumCPU(), loopsCores)
	}
	r.Check(name, rig.Median(ratios), op, aim, "%s", behind)
}

// addModel adds a model to a broker that runs.
func addModel(r *rig.Rig, socket, name string) {
	job := small64(name, smallBatch, smallSlots)
	job.Socket = socket
	r.StartEcho(job)
}

// fourModels compares the requests/s of one model and of four.
func fourModels(r *rig.Rig) {
	e := startEcho(r, 1, small64("loops", smallBatch, smallSlots))
	var all []*testbed.Process
	for i := range loopsModels {
		r.Say("loops: starting model %d of %d", i+1, loopsModels)
		name := "loops"
		if i > 0 {
			name += fmt.Sprint(i)
			addModel(r, e.socket, name)
		}
		producers := startProducers(r, smallProducers, producerJob{Socket: e.socket, Model: name, Window: smallInFlight})
		all = append(all, producers...)
	}
	rate := func(of []*testbed.Process) func() float64 {
		return func() float64 {
			rate, _ := streamRate(r, nil, of, 1, r.Round)
			return rate
		}
	}
	compareLoops(r, "four_models_ratio", ">=", 2.5,
		fmt.Sprintf("requests/s with %d models / with one, %d producers with %d in flight each:",
			loopsModels, smallProducers, smallInFlight), rate(all[:smallProducers]), rate(all))
}

// idleModels compares the p99 of a model that is alone with one among many that do nothing, of another broker.
func idleModels(r *rig.Rig) {
	r.Say("loops: starting %d idle models", loopsIdle)
	var p99 []func() float64
	for _, name := range []string{"alone", "among"} {
		e := startEcho(r, 1, small64(name, smallBatch, smallSlots))
		if name == "among" {
			r.MustStart(testbed.Spec{Role: "idle models", Job: idleModelsJob{Socket: e.socket, Models: loopsIdle}, Procs: 2})
		}
		clients := startProducers(r, 1, producerJob{Socket: e.socket, Model: name, Window: 8})
		p99 = append(p99, func() float64 { return pacedP99(r, clients) })
	}
	compareLoops(r, "idle_models_ratio", "<=", 1.2, fmt.Sprintf("p99 in µs of a model at %d/s beside %d idle ones / alone:",
		loopsRate, loopsIdle), p99[0], p99[1])
}

// pacedP99 is in microseconds.
func pacedP99(r *rig.Rig, clients []*testbed.Process) float64 {
	return float64(together(r, clients, order{Do: "paced", Rate: loopsRate}, r.Round)[0].P99) / 1e3
}

type idleModelsJob struct {
	Socket string
	Models int
}

// idleModelsRole is the worker of many models without clients.
func idleModelsRole(c *testbed.Child, job idleModelsJob) error {
	var sessions []*attach.Session
	defer func() { runtime.KeepAlive(sessions) }()
	for i := range job.Models {
		s, err := attach.Open(c.Context(), job.Socket, &control.Request{
			Op: control.OpWorker, Model: fmt.Sprint("idle", i), Policy: policy.New(policy.Slots(32), policy.MaxBatchSize(4)),
			Worker: &control.WorkerInfo{Inputs: []string{"x:u8[64]"}, Outputs: []string{"y:u8[64]"}, Depth: 1},
		})
		if err != nil {
			return err
		}
		sessions = append(sessions, s)
	}
	if err := c.Ready(); err != nil {
		return err
	}
	<-c.Context().Done()
	return nil
}
