// SPDX-License-Identifier: Apache-2.0

// Package simulate drives the broker's batcher with a virtual clock, to try a policy on a load and on
// a model whose batches take a given time. The batcher is the code that the broker runs. Simulated are:
//
//	clients commit requests (Arrivals)      → one hop →
//	the batcher decides                     → one hop →
//	a worker takes as long as the Cost says → one hop → the client has its answer
//
// The same Config, seed included, always gives the same Result.
package simulate

import (
	"cmp"
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
	Rounds   *Rounds // of each row; nil: one
	Busy     []Cost  // the cost with 1, 2 … other workers busy, if measured; else Workers.Sharing counts
	Phases   []Phase // changes of the load or the cost; each holds until the next begins
	// Hop is the time from one process to the next: client to broker, broker to worker, worker to
	// client. Every request takes three.
	Hop      time.Duration
	Requests int // how many are sent
	Seed     uint64

	HideDeadlines bool // from the batcher; they still count
	// disturb, if set, changes the time of a batch that a worker begins.
	disturb func(w batcher.WorkerID, rows int, start, took batcher.Time) batcher.Time
}

// Phase is a time in which Poisson arrivals come Rate times as often, and batches take Cost times as long.
type Phase struct {
	From       time.Duration
	Rate, Cost float64
}

// Load describes the requests.
type Load struct {
	MinRows, MaxRows int // rows per request, uniform; 0 means 1
	// MinTokens and MaxTokens are the sizes of requests, uniform; 0: all have one. All rows of a
	// request have its size, which is the cost of a row. Config.Cost is then by tokens, not by rows.
	MinTokens, MaxTokens int
	Deadline             time.Duration // time budget of each request; 0 = none
	Shapes               int           // number of different shapes, uniform; 0 means 1
	LevelShares          []float64     // shares of requests per priority level; nil: all have the default level
}

// Workers describes the workers.
type Workers struct {
	Count int
	Depth int // batches a worker may hold; 0 means 1
	Lanes int // rows that go round together; 0: whole batches
	Pad   batcher.Padding
	PadTo int
	// Sharing is how much workers on one device slow each other down: a batch that starts while k
	// other workers are busy takes 1 + k·Sharing times as long.
	Sharing float64
}

// bad is an error about a Config.
func bad(format string, args ...any) error {
	return fmt.Errorf("%w: %s", status.ErrInvalid, fmt.Sprintf(format, args...))
}

// need is an error unless ok.
func need(ok bool, format string, args ...any) error {
	if ok {
		return nil
	}
	return bad(format, args...)
}

// MaxRequests bounds the memory of one simulation: 8 bytes for each latency.
const MaxRequests = 1_000_000_000

const (
	maxWorkers = 4096
	maxSharing = 1000 // more is a typing error
)

func (c *Config) validate() error {
	if err := cmp.Or(
		need(c.Requests >= 1 && c.Requests <= MaxRequests, "requests is %d, must be 1..%d", c.Requests, MaxRequests),
		need(c.Hop >= 0 && c.Hop <= policy.MaxDuration, "hop is %v, must be 0..%v", c.Hop, policy.MaxDuration),
		need(c.Arrivals != nil, "no arrivals are given"),
	); err != nil {
		return err
	}
	for _, cost := range append([]Cost{c.Cost}, c.Busy...) {
		if err := cost.validate(); err != nil {
			return err
		}
	}
	w := &c.Workers
	return cmp.Or(
		c.Policy.Validate(),
		need(w.Count >= 1 && w.Count <= maxWorkers, "workers is %d, must be 1..%d", w.Count, maxWorkers),
		need(w.Depth >= 0, "depth is %d, must be at least 1", w.Depth),
		need(w.PadTo <= policy.MaxRows, "batches are padded to %d rows, must be at most %d", w.PadTo, policy.MaxRows),
		need(w.Sharing >= 0 && w.Sharing <= maxSharing, "sharing is %v, must be 0..%d", w.Sharing, maxSharing),
		need(len(c.Busy) == 0 || w.Sharing == 0,
			"the cost was measured with other workers busy, so it includes how they slow each other down; leave --sharing out"),
		c.Load.validate(&c.Policy),
		c.validateRounds(),
		c.Arrivals.validate(),
	)
}

func (l *Load) validate(p *policy.Settings) error {
	sum, least := 0.0, 0.0
	for _, share := range l.LevelShares {
		sum, least = sum+share, min(least, share)
	}
	given := l.LevelShares != nil
	return cmp.Or(
		need(l.MinRows >= 0 && l.MaxRows >= l.MinRows,
			"rows per request are %d to %d, must be ascending and at least 1", l.MinRows, l.MaxRows),
		need(l.MaxRows <= p.MaxBatchSize, "requests have up to %d rows, max_batch_size is %d", l.MaxRows, p.MaxBatchSize),
		need(l.MinTokens >= 0 && l.MaxTokens >= l.MinTokens && l.MaxTokens <= policy.MaxCost,
			"tokens per request are %d to %d, must be ascending and at most %d", l.MinTokens, l.MaxTokens, policy.MaxCost),
		need(l.Deadline >= 0 && l.Deadline <= policy.MaxDuration, "deadline is %v, must be 0..%v", l.Deadline, policy.MaxDuration),
		need(l.Shapes >= 0, "shapes is %d, must be at least 1", l.Shapes),
		need(!given || len(l.LevelShares) == p.LevelCount(), "%d level shares for %d levels", len(l.LevelShares), p.LevelCount()),
		need(least >= 0, "a level's share is %v, must be at least 0", least),
		need(!given || sum > 0 && !math.IsInf(sum, 0), "the shares of all levels add up to %v", sum),
	)
}

// Run simulates until every request has ended, or ctx is done; then it returns ctx's error.
func Run(ctx context.Context, cfg Config) (*Result, error) {
	w, err := newWorld(cfg)
	if err != nil {
		return nil, err
	}
	if err := w.run(ctx); err != nil {
		return nil, fmt.Errorf("simulate: %w", err)
	}
	return w.result(), nil
}
