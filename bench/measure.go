// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"fmt"

	"github.com/ringbatch/ringbatch/bench/rig"
	"github.com/ringbatch/ringbatch/internal/progress"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/test/testbed"
	"github.com/ringbatch/ringbatch/tools/load"
)

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
	job := workerJob{Socket: s.socket, Model: cfg.model(), MaxBatch: cfg.MaxBatchSize, WaitTime: cfg.WaitTime.D(), Slots: cfg.slots()}
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
func (s *serving) through(producers int, bound *bound, say *progress.Line) (*load.Result, error) {
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
	c := load.Crowd{Reporters: reporters(ps), Groups: [3]load.CPUGroup{cpuOf(s.broker), cpuOf(ps...), cpuOf(s.workers...)},
		Socket: s.socket, Model: modelName}
	return s.f.watch(&c, cfg, fmt.Sprintf("%d producers", producers), bound, say)
}

// alone is processes that run the model by themselves.
type alone struct {
	load.Crowd
	processes []*testbed.Process
}

// startAlone starts processes that run the model by themselves.
func (f *fleet) startAlone(cfg *config, processes, rows int, say *progress.Line) (*alone, error) {
	say.Say("loading the model in %d processes", processes)
	job := aloneJob{Model: cfg.model(), Rows: rows}
	ps, err := f.StartAll(processes, func(int) testbed.Spec { return testbed.Spec{Role: "alone", Job: job, Procs: 2} })
	if err != nil {
		return nil, err
	}
	return &alone{load.Crowd{Reporters: reporters(ps), Groups: [3]load.CPUGroup{1: cpuOf(ps...)}}, ps}, nil
}

// alone measures such processes.
func (f *fleet) alone(cfg *config, processes, rows int, bound *bound, say *progress.Line) (*load.Result, error) {
	c, err := f.startAlone(cfg, processes, rows, say)
	if err != nil {
		return nil, err
	}
	defer f.End(c.processes...)
	r, err := f.watch(&c.Crowd, cfg, fmt.Sprintf("%d processes on their own, batch %d", processes, rows), bound, say)
	if err != nil {
		return nil, err
	}
	r.BatchSize.Avg = float64(rows)
	return r, nil
}

func reporters(processes []*testbed.Process) (list []load.Reporter) {
	for _, p := range processes {
		list = append(list, p)
	}
	return list
}

func cpuOf(processes ...*testbed.Process) load.CPUGroup {
	var pids []int
	for _, p := range processes {
		pids = append(pids, p.Pid())
	}
	return load.CPUOf(pids...)
}

// watch measures a crowd, in turns with the bound.
func (f *fleet) watch(c *load.Crowd, cfg *config, what string, b *bound, say *progress.Line) (*load.Result, error) {
	if b == nil {
		return c.Watch(f.Context(), &cfg.Config, what, nil, say)
	}
	var full, single []*load.Window
	r, err := c.Watch(f.Context(), &cfg.Config, what, func() error { return b.run(f, cfg, &full, &single, say) }, say)
	if err != nil {
		return nil, err
	}
	r.Compare(full, single)
	return r, nil
}
