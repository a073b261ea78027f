// SPDX-License-Identifier: Apache-2.0

// Package simulate drives the broker's batcher with a virtual clock: what would
// this policy do to that load on a model which takes so long per batch size?
//
// The batcher is the very code that the broker runs. What is simulated is the
// world around it:
//
//	clients commit requests (Arrivals)      → one hop →
//	the batcher decides                     → one hop →
//	a worker takes as long as the Cost says → one hop → the client has its answer
//
// The same Config, seed included, always gives the same Result.
package simulate

import (
	"context"
	"fmt"
	"math"
	"time"

	"github.com/ringbatch/ringbatch/broker/batcher"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/status"
)

// Config describes one simulation.
type Config struct {
	Policy   policy.Settings
	Arrivals Arrivals
	Load     Load
	Workers  Workers
	Cost     Cost
	// Busy is the cost with 1, 2 … other workers busy, where it was measured;
	// without it Workers.Sharing counts.
	Busy []Cost
	// Stages are those of a pipeline that follow the one above: a request goes
	// through all of them, from one batcher to the next.
	Stages []Stage
	// Hop is the time from one process to the next: client to broker, broker
	// to worker, worker to client. Every request takes three.
	Hop time.Duration
	// Phases change the load or the cost in the middle of a run; each holds
	// until the next begins.
	Phases   []Phase
	Requests int // how many are sent; a trace may have fewer
	Seed     uint64

	hideDeadlines bool // from the batcher; they still count
	// disturb, if set, changes the time of a batch that a worker begins.
	disturb func(w batcher.WorkerID, rows int, start, took batcher.Time) batcher.Time
}

// Phase is a time in which Poisson arrivals come Rate times as often, and
// batches take Cost times as long.
type Phase struct {
	From       time.Duration
	Rate, Cost float64
}

// Stage is a further stage of a pipeline, as Config is the first.
type Stage struct {
	Policy  policy.Settings
	Workers Workers
	Cost    Cost
	Busy    []Cost
}

// Load is what the requests look like.
type Load struct {
	MinRows, MaxRows int           // rows per request, uniform; 0 means 1
	Deadline         time.Duration // time budget of each request; 0 = none
	Shapes           int           // number of different shapes, uniform; 0 means 1
	// LevelShares are the shares of requests per priority level; nil means
	// that all ask for the default level.
	LevelShares []float64
}

// Workers is what serves them.
type Workers struct {
	Count int
	Depth int // batches a worker may hold; 0 means 1
	Pad   batcher.Padding
	PadTo int
	// Sharing says how much workers on one device slow each other down: a
	// batch that starts while k other workers are busy takes 1 + k·Sharing
	// times as long.
	Sharing float64
}

// bad is an error about a Config.
func bad(format string, args ...any) error {
	return fmt.Errorf("%w: %s", status.ErrInvalid, fmt.Sprintf(format, args...))
}

// MaxRequests bounds the memory of one simulation: 8 bytes for each latency.
const MaxRequests = 1_000_000_000

const (
	maxWorkers = 4096
	maxSharing = 1000 // times as long for each other worker: a typing error
)

func (c *Config) validate() error {
	if c.Requests < 1 || c.Requests > MaxRequests {
		return bad("requests is %d, must be 1..%d", c.Requests, MaxRequests)
	}
	if c.Hop < 0 || c.Hop > policy.MaxDuration {
		return bad("hop is %v, must be 0..%v", c.Hop, policy.MaxDuration)
	}
	for i, s := range c.stages() {
		if err := s.validate(); err != nil {
			return err
		}
		if i > 0 && s.Policy.LevelCount() != c.Policy.LevelCount() {
			return bad("stage %d has %d priority levels, the first %d", i+1, s.Policy.LevelCount(), c.Policy.LevelCount())
		}
		if err := c.Load.validate(&s.Policy); err != nil {
			return err
		}
	}
	if c.Arrivals == nil {
		return bad("no arrivals are given")
	}
	return c.Arrivals.validate()
}

// stages are all of them.
func (c *Config) stages() []Stage {
	return append([]Stage{{Policy: c.Policy, Workers: c.Workers, Cost: c.Cost, Busy: c.Busy}}, c.Stages...)
}

func (s *Stage) validate() error {
	if err := s.Policy.Validate(); err != nil {
		return err
	}
	if s.Workers.Count < 1 || s.Workers.Count > maxWorkers {
		return bad("workers is %d, must be 1..%d", s.Workers.Count, maxWorkers)
	}
	if s.Workers.Depth < 0 {
		return bad("depth is %d, must be at least 1", s.Workers.Depth)
	}
	if s.Workers.PadTo > policy.MaxRows {
		return bad("batches are padded to %d rows, must be at most %d", s.Workers.PadTo, policy.MaxRows)
	}
	if !(s.Workers.Sharing >= 0 && s.Workers.Sharing <= maxSharing) { // so that NaN is out of range too
		return bad("sharing is %v, must be 0..%d", s.Workers.Sharing, maxSharing)
	}
	for _, cost := range append([]Cost{s.Cost}, s.Busy...) {
		if err := cost.validate(); err != nil {
			return err
		}
	}
	if len(s.Busy) > 0 && s.Workers.Sharing > 0 {
		return bad("the cost was measured with other workers busy: it says itself how much they slow each other down; leave --sharing out")
	}
	return nil
}

func (l *Load) validate(p *policy.Settings) error {
	if l.MinRows < 0 || l.MaxRows < l.MinRows {
		return bad("rows per request are %d to %d, must be ascending and at least 1", l.MinRows, l.MaxRows)
	}
	if l.MaxRows > p.MaxBatchSize {
		return bad("requests have up to %d rows, max_batch_size is %d", l.MaxRows, p.MaxBatchSize)
	}
	if l.Deadline < 0 || l.Deadline > policy.MaxDuration {
		return bad("deadline is %v, must be 0..%v", l.Deadline, policy.MaxDuration)
	}
	if l.Shapes < 0 {
		return bad("shapes is %d, must be at least 1", l.Shapes)
	}
	if l.LevelShares == nil {
		return nil
	}
	if len(l.LevelShares) != max(1, len(p.Levels)) {
		return bad("%d level shares for %d levels", len(l.LevelShares), max(1, len(p.Levels)))
	}
	sum := 0.0
	for _, share := range l.LevelShares {
		if !(share >= 0) {
			return bad("a level's share is %v, must be at least 0", share)
		}
		sum += share
	}
	if !(sum > 0) || math.IsInf(sum, 0) {
		return bad("the shares of all levels add up to %v", sum)
	}
	return nil
}

// Run simulates until every request has ended. It stops early, with ctx's
// error, when ctx is done.
func Run(ctx context.Context, cfg Config) (*Result, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	w, err := newWorld(cfg)
	if err != nil {
		return nil, err
	}
	if err := w.run(ctx); err != nil {
		return nil, fmt.Errorf("simulate: %w", err)
	}
	return w.result(), nil
}
