package main

import (
	"context"
	"fmt"
	"maps"
	"time"

	"github.com/ringbatch/ringbatch/shm"
)

// crowd is the processes of one measurement: those that report windows, and
// those whose CPU time is watched.
type crowd struct {
	reporters []*proc
	groups    [3][]*proc // broker, producers, workers
	socket    string     // of the broker, "" if there is none
}

// usage of everybody so far.
func (c *crowd) usage(ctx context.Context) (usage, error) {
	u := usage{batches: map[int]uint64{}}
	for i, g := range c.groups {
		var err error
		if u.cpu[i], err = cpuTimes(g); err != nil {
			return u, err
		}
	}
	if c.socket == "" {
		return u, nil
	}
	m, err := modelStats(ctx, c.socket, modelName)
	if err != nil {
		return u, err
	}
	maps.Copy(u.batches, m.BatchSize.Histogram)
	return u, nil
}

// watch runs windows until the last three agree, or there were enough.
func (c *crowd) watch(f *fleet, cfg *config, what string, say *progress) (*result, error) {
	start := shm.Now() + int64(leadTime) + int64(len(c.reporters))*int64(time.Millisecond)/4
	o := windowOrder{Start: start, Begin: start + int64(cfg.Warmup), Window: int64(cfg.Duration)}
	for _, p := range c.reporters {
		if err := p.send(o); err != nil {
			return nil, err
		}
	}
	say.line("%s: warming up", what)
	until := func(at int64) error { return pause(f.ctx, time.Duration(at-shm.Now())) }
	if err := until(o.Begin); err != nil {
		return nil, err
	}
	before, err := c.usage(f.ctx)
	if err != nil {
		return nil, err
	}
	var windows []*window
	var samples []sample
	for len(windows) < cfg.MaxWindows && !stable(samples, cfg.Stability) {
		if err := until(o.Begin + int64(len(windows)+1)*o.Window); err != nil {
			return nil, err
		}
		after, err := c.usage(f.ctx)
		if err != nil {
			return nil, err
		}
		w := newWindow()
		w.addUsage(before, after)
		before = after
		for _, p := range c.reporters {
			var r windowReport
			if err := p.receive(&r); err != nil {
				return nil, err
			}
			if err := w.addReport(&r); err != nil {
				return nil, fmt.Errorf("read the latencies of %s: %w", p.role, err)
			}
		}
		windows, samples = append(windows, w), append(samples, w.sample())
		say.line("%s: window %d, %s items/s, %s ms", what, len(windows), big(w.itemsPerS), short(w.sample().Latency/1e6))
	}
	return summarize(windows, stable(samples, cfg.Stability)), nil
}

// serving is a broker with its model workers, ready for producers.
type serving struct {
	f       *fleet
	cfg     *config
	socket  string
	broker  *proc
	workers []*proc
}

func (f *fleet) serve(cfg *config, say *progress) (*serving, error) {
	say.line("starting the broker and %d model processes", cfg.ModelNum)
	s := &serving{f: f, cfg: cfg}
	var err error
	if s.broker, s.socket, err = f.startBroker(fmt.Sprintf("%d.sock", shm.Now())); err != nil {
		return nil, err
	}
	job := workerJob{Socket: s.socket, Model: cfg.model(), MaxBatch: cfg.MaxBatchSize, WaitTime: cfg.WaitTime.d(), Slots: cfg.slots()}
	s.workers, err = f.startAll(cfg.ModelNum, func(int) spawn { return spawn{role: "model worker", job: job, procs: 2} })
	return s, err
}

// end stops them.
func (s *serving) end() { s.f.end(append([]*proc{s.broker}, s.workers...)...) }

// through measures that many producers through the broker.
func (s *serving) through(producers int, say *progress) (*result, error) {
	cfg := s.cfg
	say.line("starting %d producers", producers)
	ps, err := s.f.startAll(producers, func(i int) spawn {
		return spawn{role: "producer", procs: 2, job: producerJob{
			Socket: s.socket, Model: modelName, Rows: cfg.WorkerBatch, InFlight: cfg.InFlight,
			Rate: cfg.Rate / float64(producers), Seed: uint64(cfg.Seed)<<20 + uint64(i),
		}}
	})
	if err != nil {
		return nil, err
	}
	defer s.f.end(ps...)
	c := crowd{reporters: ps, groups: [3][]*proc{{s.broker}, ps, s.workers}, socket: s.socket}
	return c.watch(s.f, cfg, fmt.Sprintf("%d producers", producers), say)
}

// alone measures processes that run the model by themselves, each on batches
// of its own rows.
func (f *fleet) alone(cfg *config, processes, rows int, what string, say *progress) (*result, error) {
	say.line("%s: loading the model in %d processes", what, processes)
	job := aloneJob{Model: cfg.model(), Rows: rows}
	ps, err := f.startAll(processes, func(int) spawn { return spawn{role: "alone", job: job, procs: 2} })
	if err != nil {
		return nil, err
	}
	defer f.end(ps...)
	c := crowd{reporters: ps, groups: [3][]*proc{nil, ps, nil}}
	r, err := c.watch(f, cfg, what, say)
	if err != nil {
		return nil, err
	}
	r.BatchSize.Avg = float64(rows)
	return r, nil
}
