// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"context"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/ringbatch/ringbatch/broker/batcher"
	"github.com/ringbatch/ringbatch/policy"
)

// Rounds says how many rounds a row needs: log-normal numbers. Config.Cost is then the time of a round by its rows. A batch
// takes as many rounds as its longest row. A worker with lanes answers each row when it is done, and the next row takes its lane.
type Rounds struct {
	Median, Sigma float64
	Most          int // a row needs no more
}

// maxRounds keeps the time of a row, of rounds of up to maxCost each, within the virtual clock.
const maxRounds = 100_000

// laneRow is a row on its way to a worker with lanes, or in a lane.
type laneRow struct {
	batch   batcher.BatchID
	id      batcher.RequestID
	arrives batcher.Time // at the worker
	started batcher.Time
	left    int // rounds
}

// laneWorker goes rounds while it has rows.
type laneWorker struct {
	mail, busy   []laneRow
	goesRound    bool // the end of a round, or the arrival of the first row, is scheduled
	rounds, rows int
}

// ParseRounds reads MEDIAN,SIGMA or MEDIAN,SIGMA,MOST.
func ParseRounds(text string) (r Rounds, err error) {
	fields := strings.Split(text, ",")
	r.Most = maxRounds
	if len(fields) == 3 {
		r.Most, err = strconv.Atoi(fields[2])
		fields = fields[:2]
	}
	var err1, err2 error
	if len(fields) == 2 {
		r.Median, err1 = strconv.ParseFloat(fields[0], 64)
		r.Sigma, err2 = strconv.ParseFloat(fields[1], 64)
	}
	if len(fields) != 2 || err != nil || err1 != nil || err2 != nil || !(r.Median >= 1 && r.Median <= maxRounds && r.Sigma >= 0 && r.Sigma <= 5) ||
		r.Most < 1 || r.Most > maxRounds {
		return r, bad("--rounds is %q, must be MEDIAN,SIGMA or MEDIAN,SIGMA,MOST, as 24,0.75,256: rounds 1..%d, sigma 0..5", text, maxRounds)
	}
	return r, nil
}

func (c *Config) validateRounds() error {
	if c.Rounds == nil {
		return need(c.Workers.Lanes == 0, "lanes need rounds: how many a row takes")
	}
	n := c.Workers.Lanes
	if n == 0 {
		return need(c.Load.MaxRows <= 1, "with rounds a request has one row")
	}
	return need(n >= 1 && n <= 240 && c.Policy.MaxBatchSize == 1 && c.Load.MaxRows <= 1,
		"lanes is %d, must be 1..240; each row is answered alone, so that max_batch_size and rows are 1", n)
}

// randomRounds is how many rounds a row needs.
func (w *world) randomRounds() int {
	r := w.cfg.Rounds
	if r == nil {
		return 1
	}
	return int(min(max(1, math.Round(r.Median*math.Exp(r.Sigma*w.rng.NormFloat64()))), float64(r.Most)))
}

// serveInLane sends a row to a worker with lanes.
func (w *world) serveInLane(d *batcher.Dispatch) {
	x := &w.workers[d.Worker]
	id := d.Requests[0]
	w.stats.batch(d)
	x.total++
	x.rows++
	arrives := w.now + batcher.Time(w.cfg.Hop)
	x.lanes.mail = append(x.lanes.mail, laneRow{batch: d.Batch, id: id, arrives: arrives, left: w.flights[id].rounds})
	if !x.lanes.goesRound {
		x.lanes.goesRound = true
		w.events.push(event{at: arrives, worker: d.Worker, round: true})
	}
}

// goRound ends a worker's round, and begins the next. Rows that are done, or late, leave their lanes; rows that have
// arrived take them.
func (w *world) goRound(id batcher.WorkerID) {
	x := &w.workers[id]
	l := x.lanes
	kept := l.busy[:0]
	for _, row := range l.busy {
		if row.left > 0 && w.flights[row.id].deadline >= w.now {
			kept = append(kept, row)
			continue
		}
		x.given = append(x.given, []batcher.RequestID{row.id})
		seen := w.now + batcher.Time(w.cfg.Hop)
		w.events.push(event{at: seen, worker: id, batch: row.batch, started: row.started, finished: w.now})
		w.deliver(row.id, seen)
	}
	l.busy = kept
	arrived := 0
	for arrived < len(l.mail) && len(l.busy) < w.cfg.Workers.Lanes && l.mail[arrived].arrives <= w.now {
		row := l.mail[arrived]
		row.started = w.now
		l.busy = append(l.busy, row)
		arrived++
	}
	l.mail = slices.Delete(l.mail, 0, arrived)
	l.goesRound = len(l.busy)+len(l.mail) > 0
	switch {
	case len(l.busy) > 0:
		took := w.cfg.took(len(l.busy), w.othersBusy(w.now, x)) * w.phase(w.now).Cost
		x.freeAt = w.now + batcher.Time(min(max(1, took), float64(endOfTime)))
		x.busy += x.freeAt - w.now
		l.rounds++
		l.rows += len(l.busy)
		for i := range l.busy {
			l.busy[i].left--
		}
		w.events.push(event{at: x.freeAt, worker: id, round: true})
	case len(l.mail) > 0:
		w.events.push(event{at: l.mail[0].arrives, worker: id, round: true})
	}
}

// setRounds reads --rounds and --lanes.
func (c *Command) setRounds(cfg *Config) error {
	if c.rounds == "" {
		return need(c.lanes == 0, "--lanes needs --rounds: how many rounds a row takes")
	}
	r, err := ParseRounds(c.rounds)
	if err != nil {
		return err
	}
	if c.measured != nil || len(c.workers) > 1 || len(c.sizes) > 0 {
		return bad("--rounds goes with one number of --workers, without --batch-sizes and without a MODEL: --cost is the time of a round")
	}
	cfg.Rounds, cfg.Workers.Lanes = &r, c.lanes
	if c.lanes > 0 {
		if c.set.Changed("max-batch-size") {
			return bad("--lanes and --max-batch-size exclude each other: each row is answered alone")
		}
		cfg.Policy.MaxBatchSize = 1
		cfg.Workers.Depth = c.lanes + max(1, c.lanes/8) // as Python's workers hold rows ahead
	}
	return nil
}

// runWhole runs the same load with whole batches of as many rows as there are lanes.
func runWhole(ctx context.Context, cfg Config) (*Result, error) {
	cfg.Policy.MaxBatchSize = min(cfg.Workers.Lanes, policy.MaxRows)
	cfg.Workers.Lanes, cfg.Workers.Depth = 0, 1
	return Run(ctx, cfg)
}

// summary is the result of whole batches in a line.
func (r *Result) summary(of int) string {
	return fmt.Sprintf("whole batches of up to %d give %s requests/s, p50 %s, p99 %s\n", of, count(int(r.RequestsPerSecond)),
		short(r.Latency.P50), short(r.Latency.P99))
}
