// SPDX-License-Identifier: Apache-2.0

// Package fleet plays many hosts against a virtual clock: producers' hosts whose
// brokers batch and whose relays choose a GPU host for each batch, and GPU hosts
// whose brokers batch again. Every broker's batcher is the code that runs.
//
//	a request comes to a front     → its batcher → a batch, when a lane is free
//	the relay chooses a host       → the network →
//	the host's batcher             → a worker takes as long as the cost says
//	its answers                    → the network → the front has a lane again
//
// The same Config always gives the same Result.
package fleet

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/ringbatch/ringbatch/broker/auto"
	"github.com/ringbatch/ringbatch/broker/batcher"
	"github.com/ringbatch/ringbatch/broker/simulate"
	"github.com/ringbatch/ringbatch/policy"
)

// Config is one simulation.
type Config struct {
	Hosts    int
	Fronts   int // hosts with producers and a relay each
	Workers  int // of each GPU host
	Route    Route
	Rate     float64 // requests a second, all fronts together; Poisson
	Requests int
	MaxBatch int
	Wait     time.Duration // of the fronts; the hosts' is 0, as batches come to them whole
	Cost     simulate.Cost
	Network  time.Duration // one way
	Stale    time.Duration // how old a load report is, at most
	Failures float64       // of each host, an hour
	Outage   time.Duration // that each of them lasts
	Detect   time.Duration // until a relay gives a silent host up
	Window   int           // batches that a relay has at a host at most
	Seed     uint64
}

// Route is how a relay chooses.
type Route string

// The routes. Fronts know what they have sent themselves at once, and the load
// of a host as old as its last report.
const (
	Random       Route = "random"
	RoundRobin   Route = "round_robin"
	TwoChoices   Route = "two_choices"   // of two at random the one with fewer batches of this front's
	LeastRequest Route = "least_request" // of all
	Weighted     Route = "weighted"      // at random, by what hosts report to have free
	Fill         Route = "fill"          // the first that has room, by its report and by what was sent since
)

// Routes lists them.
func Routes() []Route {
	return []Route{Random, RoundRobin, TwoChoices, LeastRequest, Weighted, Fill}
}

// Result is what came of it.
type Result struct {
	Route        Route   `json:"route"`
	Requests     int     `json:"requests"`
	P50MS        float64 `json:"p50_ms"`
	P99MS        float64 `json:"p99_ms"`
	MeanMS       float64 `json:"mean_ms"`
	GPUSeconds   float64 `json:"gpu_seconds_per_million"`
	MeanBatch    float64 `json:"mean_batch"`
	Utilization  float64 `json:"utilization"`   // busy time of all workers
	HostsUsed    float64 `json:"hosts_used"`    // hosts that ran anything, in the mean second
	Resent       int     `json:"resent"`        // batches whose host failed
	VirtualHours float64 `json:"virtual_hours"` // how long it took there
}

// Limits keep typing errors from filling the memory.
const (
	MaxHosts    = 10_000
	MaxRequests = 100_000_000

	maxTime = 24 * time.Hour       // of network, outages, …
	maxSpan = 365 * 24 * time.Hour // of all requests, in the mean
)

func (c *Config) check() error {
	wrong := func(format string, args ...any) error {
		return fmt.Errorf("%w: %s", simulate.ErrConfig, fmt.Sprintf(format, args...))
	}
	switch {
	case c.Hosts < 1 || c.Hosts > MaxHosts:
		return wrong("hosts is %d, must be 1..%d", c.Hosts, MaxHosts)
	case c.Fronts < 1 || c.Fronts > MaxHosts:
		return wrong("fronts is %d, must be 1..%d", c.Fronts, MaxHosts)
	case c.Workers < 1 || c.Workers > 64:
		return wrong("workers is %d, must be 1..64", c.Workers)
	case c.Requests < 1 || c.Requests > MaxRequests:
		return wrong("requests is %d, must be 1..%d", c.Requests, MaxRequests)
	case !(c.Rate > 0 && c.Rate < 1e9):
		return wrong("rate is %v requests a second", c.Rate)
	case float64(c.Requests)/c.Rate > maxSpan.Seconds():
		return wrong("%d requests would take more than a year at %v a second", c.Requests, c.Rate)
	case c.Window < 1 || c.MaxBatch < 1 || c.MaxBatch > 16384:
		return wrong("window is %d and max_batch_size %d, both at least 1", c.Window, c.MaxBatch)
	case min(c.Network, c.Stale, c.Outage, c.Detect, c.Wait) < 0 || !(c.Failures >= 0):
		return wrong("a time or rate below zero")
	case max(c.Network, c.Stale, c.Outage, c.Detect, c.Wait) > maxTime:
		return wrong("a time of more than %v", maxTime)
	case len(c.Cost) == 0:
		return wrong("no cost of the model is given")
	case c.Failures*(c.Cost.Of(c.MaxBatch)+2*c.Network).Hours() > 1:
		return wrong("hosts that fail %v times an hour end no batch, which takes %v and %v each way", c.Failures, c.Cost.Of(c.MaxBatch), c.Network)
	case !slices.Contains(Routes(), c.Route):
		return wrong("no route %q; there are %v", c.Route, Routes())
	}
	return nil
}

// front is a producers' host.
type front struct {
	b        *auto.Batcher
	wake     batcher.Time // for which there is an event
	inFlight []int32      // batches at each host
	turn     int
	free     []batcher.RequestID
	arrived  []batcher.Time // by request
}

// gpu is a GPU host.
type gpu struct {
	b       *auto.Batcher
	life    int // its failures so far: what was sent to an earlier one is lost
	down    bool
	rows    int // at the host or on the way
	told    int // of that, in its last report
	free    []batcher.RequestID
	parts   []*parcel // by request: whose it is
	wake    batcher.Time
	used    int64 // the second that it ran something in last
	running map[batcher.BatchID][]batcher.RequestID
}

// parcel is a front's batch on its way.
type parcel struct {
	front    int32
	host     int32
	life     int
	batch    batcher.BatchID
	requests []batcher.RequestID // the front's
	left     int                 // not answered yet
	sent     batcher.Time
}

type world struct {
	cfg    Config
	rng    *rand.Rand
	now    batcher.Time
	events events
	fronts []front
	hosts  []gpu
	up     int       // hosts that are not down
	lost   []*parcel // that wait for one, since all were
	sent   int

	latencies []float32 // seconds
	ended     int
	busy      time.Duration
	batches   int
	rows      int
	resent    int
	seconds   map[int64]int
}

// Run plays until every request is answered.
func Run(ctx context.Context, cfg Config) (*Result, error) {
	if err := cfg.check(); err != nil {
		return nil, err
	}
	w := &world{cfg: cfg, rng: rand.New(rand.NewPCG(cfg.Seed, 0x666c656574)), latencies: make([]float32, 0, cfg.Requests), seconds: map[int64]int{}}
	for range cfg.Fronts {
		b, err := w.newBatcher(cfg.Wait)
		if err != nil {
			return nil, err
		}
		// Clients are not modelled one by one: there are always others who could join.
		lanes := max(1, cfg.Window*cfg.Hosts)
		b.WorkerReady(batcher.Worker{Lanes: lanes, Depth: lanes})
		w.fronts = append(w.fronts, front{b: b, wake: batcher.Never, inFlight: make([]int32, cfg.Hosts), turn: w.rng.IntN(cfg.Hosts)})
	}
	w.up = cfg.Hosts
	for i := range cfg.Hosts {
		h := gpu{wake: batcher.Never, used: -1}
		w.hosts = append(w.hosts, h)
		if err := w.boot(i); err != nil {
			return nil, err
		}
		if cfg.Failures > 0 {
			w.after(w.healthy(), event{kind: fails, index: int32(i)})
		}
	}
	w.after(w.gap(), event{kind: comes})
	if cfg.Stale > 0 {
		w.after(cfg.Stale, event{kind: reports})
	}
	if err := w.run(ctx); err != nil {
		return nil, err
	}
	return w.result(), nil
}

func (w *world) newBatcher(wait time.Duration) (*auto.Batcher, error) {
	b, err := auto.NewBatcher(policy.Settings{MaxBatchSize: w.cfg.MaxBatch, WaitTime: wait})
	if err == nil {
		b.ClientJoined(0)
		b.ClientJoined(1) // who never sends: somebody could always join
	}
	return b, err
}

func (w *world) boot(i int) error {
	b, err := w.newBatcher(0)
	if err != nil {
		return err
	}
	for k := range w.cfg.Workers {
		b.WorkerReady(batcher.Worker{ID: batcher.WorkerID(k), Depth: 1})
	}
	h := &w.hosts[i]
	*h = gpu{b: b, life: h.life, wake: batcher.Never, used: h.used, running: map[batcher.BatchID][]batcher.RequestID{}}
	return nil
}

func (w *world) gap() time.Duration {
	return time.Duration(w.rng.ExpFloat64() / w.cfg.Rate * float64(time.Second))
}

func (w *world) after(d time.Duration, e event) {
	e.at = w.now + batcher.Time(max(0, d))
	w.events.push(e)
}

// healthy is how long a host is until it fails: not so long that it would not fit into a time.
func (w *world) healthy() time.Duration {
	return time.Duration(min(w.rng.ExpFloat64()/w.cfg.Failures*float64(time.Hour), 100*float64(maxSpan)))
}

func (w *world) run(ctx context.Context) error {
	for n := 0; w.ended < w.cfg.Requests; n++ {
		if n%8192 == 0 && ctx.Err() != nil {
			return ctx.Err()
		}
		if w.events.empty() {
			return fmt.Errorf("%d of %d requests wait for ever", w.cfg.Requests-w.ended, w.cfg.Requests) // a bug
		}
		e := w.events.pop()
		w.now = e.at
		w.handle(e)
	}
	return nil
}

func (w *world) result() *Result {
	slices.Sort(w.latencies)
	at := func(q float64) float64 { return float64(w.latencies[int(q*float64(len(w.latencies)-1))]) * 1e3 }
	mean := 0.0
	for _, s := range w.latencies {
		mean += float64(s)
	}
	n := float64(len(w.latencies))
	span := time.Duration(w.now).Seconds()
	used := 0
	for _, hosts := range w.seconds {
		used += hosts
	}
	return &Result{
		Route: w.cfg.Route, Requests: len(w.latencies), P50MS: at(0.5), P99MS: at(0.99), MeanMS: mean / n * 1e3,
		GPUSeconds: w.busy.Seconds() / n * 1e6, MeanBatch: float64(w.rows) / float64(max(1, w.batches)),
		Utilization: w.busy.Seconds() / span / float64(w.cfg.Hosts*w.cfg.Workers),
		HostsUsed:   float64(used) / float64(max(1, len(w.seconds))), Resent: w.resent, VirtualHours: span / 3600,
	}
}
