// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"fmt"
	"runtime"
	"time"

	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/internal/attach"
	"github.com/ringbatch/ringbatch/internal/control"
	"github.com/ringbatch/ringbatch/internal/progress"
	"github.com/ringbatch/ringbatch/internal/testbed"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/shm"
)

// loopsFigures: what models of one broker cost one another. Each is served by
// one of the broker's loops.
type loopsFigures struct {
	Cores int `json:"cores"`
	Loops int `json:"loops"`

	OnePerS  float64   `json:"one_model_requests_per_s"`
	FourPerS float64   `json:"four_models_requests_per_s"`
	Rounds   []float64 `json:"rounds"`

	QuietP99US   float64   `json:"quiet_p99_us"`
	HostileP99US float64   `json:"hostile_p99_us"`
	Hostile      []float64 `json:"hostile_rounds"`

	AloneP99US float64   `json:"alone_p99_us"`
	AmongP99US float64   `json:"among_idle_p99_us"`
	Among      []float64 `json:"among_idle_rounds"`
	IdleModels int       `json:"idle_models"`
}

const (
	loopsModels = 4
	loopsRate   = 2000 // requests per second of the model whose p99 counts
	loopsIdle   = 1000 // models that do nothing

	// Four models at their limit take four loops, four workers, and producers.
	// With fewer cores it is those that are measured.
	loopsCores = 16
)

func measureLoops(f *fleet, o transportOptions, say *progress.Line, r *transportReport) error {
	fig := &loopsFigures{Cores: runtime.NumCPU(), Loops: broker.DefaultLoops(), IdleModels: loopsIdle}
	r.Loops = fig
	for _, part := range []func(*fleet, transportOptions, *progress.Line, *loopsFigures) error{fourModels, hostileNeighbour, idleModels} {
		if err := part(f, o, say, fig); err != nil {
			return err
		}
	}
	r.FourModelsRatio, r.HostileRatio, r.IdleModelsRatio = medianOf(fig.Rounds), medianOf(fig.Hostile), medianOf(fig.Among)
	judge := func(name string, measured float64, must string, ok bool, behind string, a ...any) {
		if fig.Cores < loopsCores {
			must, ok = "-", true
			behind += fmt.Sprintf("; not judged: %d cores, of %d that it takes", fig.Cores, loopsCores)
		}
		r.check(name, measured, must, ok, behind, a...)
	}
	judge("four_models_ratio", r.FourModelsRatio, ">= 2.5", r.FourModelsRatio >= 2.5,
		"%s requests/s with %d models / %s with one, %d producers with %d in flight each, %d loops; median of %d rounds",
		big(fig.FourPerS), loopsModels, big(fig.OnePerS), smallProducers, smallInFlight, fig.Loops, len(fig.Rounds))
	judge("hostile_ratio", r.HostileRatio, "<= 1.2", r.HostileRatio <= 1.2,
		"p99 of a model at %d/s beside one whose client sends entries without end %.0f µs / %.0f µs; median of %d rounds",
		loopsRate, fig.HostileP99US, fig.QuietP99US, len(fig.Hostile))
	judge("idle_models_ratio", r.IdleModelsRatio, "<= 1.2", r.IdleModelsRatio <= 1.2,
		"p99 of a model at %d/s beside %d idle ones %.0f µs / %.0f µs alone; median of %d rounds",
		loopsRate, loopsIdle, fig.AmongP99US, fig.AloneP99US, len(fig.Among))
	return nil
}

func loopsModel(name string) echoJob {
	return echoJob{Model: name, Inputs: []string{"x:u8[64]"}, Outputs: []string{"y:u8[64]"}, MaxBatch: smallBatch, Slots: 4 * smallProducers * smallInFlight}
}

// fourModels compares the requests/s of one model and of four.
func fourModels(f *fleet, o transportOptions, say *progress.Line, fig *loopsFigures) error {
	e, err := f.startEcho(1, loopsModel("loops"))
	if err != nil {
		return err
	}
	var all, one []*testbed.Process
	for i := range loopsModels {
		say.Say("loops: starting model %d of %d", i+1, loopsModels)
		name := "loops"
		if i > 0 {
			name += fmt.Sprint(i)
			if err := f.echoOn(e.socket, name); err != nil {
				return err
			}
		}
		producers, err := f.startTransport(smallProducers, transportJob{Socket: e.socket, Model: name, Window: smallInFlight, Sessions: 1})
		if err != nil {
			return err
		}
		if all = append(all, producers...); i == 0 {
			one = producers
		}
	}
	var ones, fours []float64
	err = inTurns("loops: one and four models", o, say, func(counts bool) error {
		alone, _, err := streamRate(nil, one, 1, o.Round)
		if err != nil {
			return err
		}
		together, _, err := streamRate(nil, all, 1, o.Round)
		if err == nil && counts {
			ones, fours, fig.Rounds = append(ones, alone), append(fours, together), append(fig.Rounds, together/alone)
		}
		return err
	})
	fig.OnePerS, fig.FourPerS = medianOf(ones), medianOf(fours)
	return err
}

// hostileNeighbour compares the p99 of a model while a client of another one is
// quiet, and while it floods the broker.
func hostileNeighbour(f *fleet, o transportOptions, say *progress.Line, fig *loopsFigures) error {
	e, err := f.startEcho(1, loopsModel("flooded"))
	if err != nil {
		return err
	}
	if err := f.echoOn(e.socket, "neighbour"); err != nil {
		return err
	}
	flood, err := f.StartReady(testbed.Spec{Role: "flood", Job: floodJob{Socket: e.socket, Model: "flooded"}, Procs: 2})
	if err != nil {
		return err
	}
	clients, err := f.startTransport(1, transportJob{Socket: e.socket, Model: "neighbour", Window: 8, Sessions: 1})
	if err != nil {
		return err
	}
	var quiet, hostile []float64
	err = inTurns("loops: a hostile neighbour", o, say, func(counts bool) error {
		calm, err := pacedP99(clients, o.Round)
		if err != nil {
			return err
		}
		start := shm.Now()
		if err := flood.Send(floodOrder{Until: start + int64(o.Round) + 2*int64(leadTime)}); err != nil {
			return err
		}
		loud, err := pacedP99(clients, o.Round)
		if err != nil {
			return err
		}
		var res floodResult
		if err := flood.Receive(&res); err != nil {
			return err
		}
		if counts {
			quiet, hostile, fig.Hostile = append(quiet, calm), append(hostile, loud), append(fig.Hostile, loud/calm)
		}
		return nil
	})
	fig.QuietP99US, fig.HostileP99US = medianOf(quiet), medianOf(hostile)
	return err
}

// idleModels compares the p99 of a model that is alone with that of one among
// many that do nothing, of another broker.
func idleModels(f *fleet, o transportOptions, say *progress.Line, fig *loopsFigures) error {
	say.Say("loops: starting %d idle models", loopsIdle)
	var clients [2][]*testbed.Process
	for i, name := range []string{"alone", "among"} {
		e, err := f.startEcho(1, loopsModel(name))
		if err != nil {
			return err
		}
		if i == 1 {
			if _, err := f.StartReady(testbed.Spec{Role: "idle models", Job: idleModelsJob{Socket: e.socket, Models: loopsIdle}, Procs: 2}); err != nil {
				return err
			}
		}
		if clients[i], err = f.startTransport(1, transportJob{Socket: e.socket, Model: name, Window: 8, Sessions: 1}); err != nil {
			return err
		}
	}
	var alone, among []float64
	err := inTurns("loops: idle models", o, say, func(counts bool) error {
		a, err := pacedP99(clients[0], o.Round)
		if err != nil {
			return err
		}
		b, err := pacedP99(clients[1], o.Round)
		if err == nil && counts {
			alone, among, fig.Among = append(alone, a), append(among, b), append(fig.Among, b/a)
		}
		return err
	})
	fig.AloneP99US, fig.AmongP99US = medianOf(alone), medianOf(among)
	return err
}

// echoOn adds a model to a broker that runs.
func (f *fleet) echoOn(socket, name string) error {
	job := loopsModel(name)
	job.Socket = socket
	_, err := f.StartReady(testbed.Spec{Role: "echo worker", Job: job, Procs: 2})
	return err
}

// inTurns runs the rounds of a comparison; the first does not count.
func inTurns(what string, o transportOptions, say *progress.Line, round func(counts bool) error) error {
	for i := range o.Rounds + 1 {
		say.Say("%s: round %d of %d", what, i+1, o.Rounds+1)
		if err := round(i > 0); err != nil {
			return err
		}
	}
	return nil
}

// pacedP99 is in microseconds.
func pacedP99(clients []*testbed.Process, d time.Duration) (float64, error) {
	rs, err := together(clients, transportOrder{Do: "paced", Rate: loopsRate}, d)
	if err != nil {
		return 0, err
	}
	return float64(rs[0].P99) / 1e3, nil
}

type floodJob struct{ Socket, Model string }

type floodOrder struct{ Until int64 } // on shm.Now's clock

type floodResult struct{ Entries int }

// floodRole is a client that speaks the protocol and means ill: it sends
// entries that come to nothing, and rings, as fast as it can.
func floodRole(c *testbed.Child, job floodJob) error {
	const window = 256
	s, err := attach.Open(context.Background(), job.Socket, shm.Memfd{}, &control.Request{Op: control.OpClient, Model: job.Model, Window: window})
	if err != nil {
		return err
	}
	ring := shm.Producer[shm.Commit]{Ring: shm.CommitRing(s.Words, s.Info.Window)}
	nothing := shm.Commit{Kind: shm.KindCancel, Rows: 1, Slot: s.Info.FirstSlot, Gen: s.Info.FirstGen}
	return testbed.Serve(c, func(o floodOrder) (res floodResult, err error) {
		for shm.Now() < o.Until {
			if _, full := ring.Push(&nothing); !full {
				res.Entries++
			}
			s.Doorbell.Ring()
		}
		return res, nil
	})
}

type idleModelsJob struct {
	Socket string
	Models int
}

// idleModelsRole is the worker of many models that nobody uses.
func idleModelsRole(c *testbed.Child, job idleModelsJob) error {
	var sessions []*attach.Session
	defer func() { runtime.KeepAlive(sessions) }()
	for i := range job.Models {
		s, err := attach.Open(c.Context(), job.Socket, shm.Memfd{}, &control.Request{
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
