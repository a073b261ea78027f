// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"fmt"
	"maps"
	"math"
	"os"
	"runtime"
	"time"

	"github.com/ringbatch/ringbatch/bench/rig"
	"github.com/ringbatch/ringbatch/internal/printable"
	"github.com/ringbatch/ringbatch/internal/progress"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/test/testbed"
)

// crowd is the participants of one measurement: the reporters of windows, and the
// processes whose CPU time is watched.
type crowd struct {
	reporters []reporter
	groups    [3]cpuGroup // broker, producers, workers
	socket    string      // of the broker, "" if there is none
	model     string
	processes []*testbed.Process // started for this crowd
}

// reporter runs the load of each window that it receives, and reports. It is a process,
// or a producer in this one.
type reporter interface {
	Send(command any) error
	Receive(into any) error
	String() string
}

func reporters(processes []*testbed.Process) (list []reporter) {
	for _, p := range processes {
		list = append(list, p)
	}
	return list
}

// usage of all participants so far.
func (c *crowd) usage(ctx context.Context) (usage, error) {
	u := usage{batches: map[int]uint64{}}
	for i, g := range c.groups {
		var err error
		if u.cpu[i], err = g.time(); err != nil {
			return u, err
		}
	}
	var err error
	if u.others, err = testbed.MachineTime(); err != nil {
		return u, err
	}
	u.others -= u.cpu[0] + u.cpu[1] + u.cpu[2]
	if !c.groups[1].has(os.Getpid()) { // this process is not one of the producers
		own, err := testbed.CPUTime(os.Getpid())
		if err != nil {
			return u, err
		}
		u.others -= own
	}
	u.span = time.Duration(shm.Now() * int64(runtime.NumCPU()))
	if c.socket == "" {
		return u, nil
	}
	m, err := rig.ModelStats(ctx, c.socket, c.model)
	if err != nil {
		return u, err
	}
	maps.Copy(u.batches, m.BatchSize.Histogram)
	return u, nil
}

// run is one window of all participants: warm up, then measure.
func (c *crowd) run(f *fleet, warmup, length time.Duration) (*window, error) {
	start := shm.Now() + int64(rig.LeadTime) + int64(len(c.reporters))*int64(time.Millisecond)/4
	o := windowOrder{Start: start, Begin: start + int64(warmup)}
	o.End = o.Begin + int64(length)
	for _, p := range c.reporters {
		if err := p.Send(o); err != nil {
			return nil, err
		}
	}
	w := newWindow()
	var before usage
	for i, at := range []int64{o.Begin, o.End} {
		if err := rig.Pause(f.Context(), time.Duration(at-shm.Now())); err != nil {
			return nil, err
		}
		u, err := c.usage(f.Context())
		if err != nil {
			return nil, err
		}
		if i == 0 {
			before = u
		} else {
			w.addUsage(before, u)
		}
	}
	for _, p := range c.reporters {
		var r windowReport
		if err := p.Receive(&r); err != nil {
			return nil, err
		}
		if err := w.addReport(&r); err != nil {
			return nil, fmt.Errorf("read the latencies of %s: %w", p, err)
		}
	}
	return w, nil
}

// watch runs windows until the last three agree or there were MaxWindows, in turns with
// the bound.
func (c *crowd) watch(f *fleet, cfg *config, what string, bound *bound, say *progress.Line) (*result, error) {
	var windows []*window
	var bounds boundWindows
	var samples []sample
	say.Say("%s: warming up", what)
	warmup := cfg.Warmup.d()
	for len(windows) < cfg.MaxWindows && (cfg.allWindows || !stable(samples, cfg.Stability)) {
		w, err := c.run(f, warmup, cfg.Duration.d())
		if err != nil && cfg.allWindows && len(windows) > 0 {
			return summarize(windows, stable(samples, cfg.Stability), len(windows)), err
		}
		if err != nil {
			return nil, err
		}
		windows, samples = append(windows, w), append(samples, w.sample())
		say.Say("%s: window %d, %s items/s, %s ms", what, len(windows), printable.Number(w.itemsPerS), printable.Number(w.sample().Latency/1e6))
		warmup = min(cfg.Warmup.d(), max(rewarm, 2*time.Duration(w.sample().Latency)))
		if bound == nil {
			continue
		}
		if err := bound.run(f, cfg, &bounds, say); err != nil {
			return nil, err
		}
	}
	counted := minWindows
	if cfg.allWindows {
		counted = len(windows)
	}
	r := summarize(windows, stable(samples, cfg.Stability), counted)
	r.compare(&bounds)
	return r, nil
}

// rewarm is the shortest warm-up after a pause.
const rewarm = 200 * time.Millisecond

// serving is a broker with its model workers, ready for producers.
type serving struct {
	f       *fleet
	cfg     *config
	socket  string
	broker  *testbed.Process
	workers []*testbed.Process
}

func (f *fleet) serve(cfg *config, say *progress.Line) (*serving, error) {
	say.Say("starting the broker and %d model processes", cfg.ModelNum)
	s := &serving{f: f, cfg: cfg}
	var err error
	if s.broker, s.socket, err = rig.StartBroker(f.Bed, fmt.Sprintf("%d.sock", shm.Now())); err != nil {
		return nil, err
	}
	job := workerJob{Socket: s.socket, Model: cfg.model(), MaxBatch: cfg.MaxBatchSize, WaitTime: cfg.WaitTime.d(), Slots: cfg.slots()}
	s.workers, err = f.StartAll(cfg.ModelNum, func(int) testbed.Spec { return testbed.Spec{Role: "model worker", Job: job, Procs: 2} })
	if err != nil {
		return nil, err
	}
	for _, p := range s.workers {
		p.Essential()
	}
	return s, nil
}

// end stops them.
func (s *serving) end() { s.f.End(append([]*testbed.Process{s.broker}, s.workers...)...) }

// through measures producers through the broker, in turns with the bound.
func (s *serving) through(producers int, bound *bound, say *progress.Line) (*result, error) {
	cfg := s.cfg
	say.Say("starting %d producers", producers)
	ps, err := s.f.StartAll(producers, func(i int) testbed.Spec {
		job := cfg.producer()
		job.Socket, job.Rate, job.Seed = s.socket, cfg.Rate/float64(producers), uint64(cfg.Seed)<<20+uint64(i)
		return testbed.Spec{Role: "producer", Procs: 2, Job: job}
	})
	if err != nil {
		return nil, err
	}
	defer s.f.End(ps...)
	c := crowd{reporters: reporters(ps), groups: [3]cpuGroup{cpuOf(s.broker), cpuOf(ps...), cpuOf(s.workers...)}, socket: s.socket,
		model: modelName}
	return c.watch(s.f, cfg, fmt.Sprintf("%d producers", producers), bound, say)
}

// startAlone starts processes that run the model by themselves.
func (f *fleet) startAlone(cfg *config, processes, rows int, say *progress.Line) (*crowd, error) {
	say.Say("loading the model in %d processes", processes)
	job := aloneJob{Model: cfg.model(), Rows: rows}
	ps, err := f.StartAll(processes, func(int) testbed.Spec { return testbed.Spec{Role: "alone", Job: job, Procs: 2} })
	if err != nil {
		return nil, err
	}
	return &crowd{reporters: reporters(ps), groups: [3]cpuGroup{1: cpuOf(ps...)}, processes: ps}, nil
}

// alone measures such processes.
func (f *fleet) alone(cfg *config, processes, rows int, bound *bound, say *progress.Line) (*result, error) {
	c, err := f.startAlone(cfg, processes, rows, say)
	if err != nil {
		return nil, err
	}
	defer f.End(c.processes...)
	r, err := c.watch(f, cfg, fmt.Sprintf("%d processes on their own, batch %d", processes, rows), bound, say)
	if err != nil {
		return nil, err
	}
	r.BatchSize.Avg = float64(rows)
	return r, nil
}

// sample is a window's figures for the stability rule.
type sample struct {
	Throughput float64
	Latency    float64
}

// stable reports whether the last three windows agree: each one's throughput
// and average latency within percent of the mean of the three.
func stable(windows []sample, percent float64) bool {
	if len(windows) < minWindows {
		return false
	}
	last := windows[len(windows)-minWindows:]
	agree := func(of func(sample) float64) bool {
		mean := 0.0
		for _, w := range last {
			mean += of(w) / minWindows
		}
		for _, w := range last {
			if math.Abs(of(w)-mean) > percent/100*mean {
				return false
			}
		}
		return mean > 0
	}
	return agree(func(s sample) float64 { return s.Throughput }) && agree(func(s sample) float64 { return s.Latency })
}
