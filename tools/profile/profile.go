// SPDX-License-Identifier: Apache-2.0

// Package profile measures how long batches of a model take, by rows and by the number of
// workers that are busy at the same time.
//
// One request of n rows makes a batch of n rows. k clients, each with one request in
// flight and without a wait time, keep k workers busy. The broker's record of finished
// batches has the time from the worker's start to its end, without queue and wake-ups,
// and shows which other workers were busy.
package profile

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/admin/stats"
	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/internal/typo"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/tools/feed"
)

// Options choose the measurements.
type Options struct {
	Socket string
	Model  string
	Feed   func(*tensor.Signature) (*feed.Feed, error)
	Busy   []int         // numbers of busy workers; nil: 1, 2, 4 … all
	Time   time.Duration // of measuring, approximately
	// Progress, if not nil, is called with the share that is done, from 0 to 1.
	Progress func(share float64, doing string)
	Patience Patience // with a model without workers
}

// Profile has the results.
type Profile struct {
	Model        string
	Workers      int
	MaxBatchSize int
	Points       []Point // by busy, then by rows
	// Unfinished is true after an interrupt.
	Unfinished bool
	// Missing are kinds of batches that were seen too rarely.
	Missing []Kind
	Lost    uint64 // meanwhile
}

// Kind is a kind of batch: its rows, and the number of busy workers.
type Kind struct {
	Rows int
	Busy int
}

// Point is the time of batches of one kind.
type Point struct {
	Rows    int
	Busy    int     // workers, this one included
	MS      float64 // median
	Low     float64
	High    float64 // 95 % interval of the median
	Batches int
}

// BatchError is the error of a batch of Rows rows that failed while Busy workers were busy.
type BatchError struct {
	Rows, Busy int
	Err        error
}

func (e *BatchError) Error() string {
	if e.Busy > 1 {
		return fmt.Sprintf("batch of %d rows, with %d workers busy: %v", e.Rows, e.Busy, e.Err)
	}
	return fmt.Sprintf("batch of %d rows: %v", e.Rows, e.Err)
}

// Unwrap returns Err.
func (e *BatchError) Unwrap() error { return e.Err }

// rounds is how often all kinds are measured. So a busy moment of the machine affects all
// kinds, and an interrupted run has results of each.
const rounds = 3

// leastBatches is the least number of batches of a kind that counts.
const leastBatches = 3

type run struct {
	o       Options
	admin   *admin.Client
	feed    *feed.Feed
	profile *Profile
	samples map[Kind][]float64 // milliseconds
	clients []*client.Client
	spread  time.Duration // of one kind and round
	cells   []Kind
}

// Measure runs until everything is measured or ctx ends. With an error it returns the
// results so far.
func Measure(ctx context.Context, o Options) (*Profile, error) {
	r := &run{o: o, admin: admin.New(o.Socket), samples: map[Kind][]float64{}}
	if err := r.prepare(ctx); err != nil {
		return nil, err
	}
	defer r.close()
	restore, err := r.stopWaiting(ctx)
	if err != nil {
		return nil, err
	}
	defer restore()
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	go func() { stop(AwaitNoWorker(ctx, r.admin, o.Model, o.Patience)) }()
	r.spread = o.Time / time.Duration(rounds*len(r.cells))
	before := r.workersLost(ctx)
	err = r.measureAll(ctx)
	r.profile.Unfinished = err != nil
	if after := r.workersLost(context.WithoutCancel(ctx)); after > before {
		r.profile.Lost = after - before
	}
	r.summarize()
	if cause := context.Cause(ctx); err != nil && errors.Is(cause, status.ErrNoWorker) {
		err = cause
	}
	return r.profile, err
}

// workersLost is the number of workers that the model has lost so far.
func (r *run) workersLost(ctx context.Context) uint64 {
	if s, err := r.admin.Stats(ctx); err == nil && s.Model(r.o.Model) != nil {
		return s.Model(r.o.Model).WorkersLost
	}
	return 0
}

// measureAll measures every kind in each round.
func (r *run) measureAll(ctx context.Context) error {
	begin, all := time.Now(), rounds*len(r.cells)
	for i := range all {
		c := r.cells[i%len(r.cells)]
		if r.o.Progress != nil {
			r.o.Progress(float64(i)/float64(all), fmt.Sprintf("%d rows, %d busy; %v", c.Rows, c.Busy, left(begin, i, all)))
		}
		if err := r.measure(ctx, c); err != nil {
			return err
		}
	}
	return nil
}

// left is the estimated remaining time.
func left(begin time.Time, done, all int) string {
	if done == 0 {
		return "…"
	}
	d := time.Since(begin) / time.Duration(done) * time.Duration(all-done)
	return d.Round(time.Second).String() + " left"
}

// prepare attaches, and lists the kinds to measure.
func (r *run) prepare(ctx context.Context) error {
	workers, pipeline, err := Workers(ctx, r.admin, r.o.Model)
	if err != nil {
		return err
	}
	if pipeline {
		return fmt.Errorf("%w: %q is a pipeline, whose batches differ from stage to stage; ringbatch bench loads it, and ringbatch "+
			"stats shows what each stage takes", status.ErrInvalid, r.o.Model)
	}
	first, err := client.Dial(ctx, r.o.Model, client.WithSocket(r.o.Socket), client.WithWindow(1), client.WithName("ringbatch simulate"))
	if err != nil {
		return err
	}
	m := first.Model()
	_ = first.Close()
	if r.feed, err = r.o.Feed(&m.Signature); err != nil {
		return err
	}
	r.profile = &Profile{Model: r.o.Model, Workers: workers, MaxBatchSize: m.MaxBatchSize}
	sizes, busy := doubling(m.MaxBatchSize), slices.Compact(slices.Sorted(slices.Values(r.o.Busy)))
	if len(busy) == 0 {
		busy = doubling(workers)
	}
	for _, k := range busy {
		if k < 1 || k > workers {
			return fmt.Errorf("%w: %d busy workers were asked for, the model has %d", status.ErrInvalid, k, workers)
		}
		for _, n := range sizes {
			r.cells = append(r.cells, Kind{n, k})
		}
	}
	for range slices.Max(busy) {
		c, err := client.Dial(ctx, r.o.Model, client.WithSocket(r.o.Socket), client.WithWindow(m.MaxBatchSize),
			client.WithName("ringbatch simulate"))
		if err != nil {
			r.close()
			return fmt.Errorf("%w; keeping %d workers busy with %d rows each takes that many slots besides those of other clients", err,
				slices.Max(busy), m.MaxBatchSize)
		}
		r.clients = append(r.clients, c)
	}
	return nil
}

// Workers is the number of workers of a model, or the least of all stages of a pipeline. If there is none, it returns an error.
func Workers(ctx context.Context, a *admin.Client, model string) (n int, pipeline bool, err error) {
	s, err := a.Stats(ctx)
	if err != nil {
		return 0, false, err
	}
	return workersOf(s, model)
}

func workersOf(s *stats.Broker, model string) (n int, pipeline bool, err error) {
	m := s.Model(model)
	if m == nil {
		var there []string
		for i := range s.Models {
			there = append(there, s.Models[i].Name)
		}
		return 0, false, fmt.Errorf("%w: %q%s; ringbatch models lists them", status.ErrUnknownModel, model, typo.DidYouMean(model, there))
	}
	pipeline = len(m.Stages) > 0
	if pipeline { // its stages have the workers
		n = m.ReadyWorkers
	}
	for _, w := range m.Workers {
		if w.State == "idle" || w.State == "busy" {
			n++
		}
	}
	if n == 0 {
		return 0, false, fmt.Errorf("%w: model %q has no worker that could be measured: start one first", status.ErrNoWorker, model)
	}
	return n, pipeline, nil
}

// doubling is 1, 2, 4 … and n.
func doubling(n int) (list []int) {
	for i := 1; i < n; i *= 2 {
		list = append(list, i)
	}
	return append(list, n)
}

func (r *run) close() {
	for _, c := range r.clients {
		_ = c.Close()
	}
}

// stopWaiting sets the model's wait_time and latency_goal to 0. restore sets them back.
func (r *run) stopWaiting(ctx context.Context) (restore func(), err error) {
	models, err := r.admin.Models(ctx)
	if err != nil {
		return nil, err
	}
	at := slices.IndexFunc(models, func(m admin.Model) bool { return m.Name == r.o.Model })
	if at < 0 {
		return nil, fmt.Errorf("%w: %q", status.ErrUnknownModel, r.o.Model)
	}
	was := policy.Policy{}
	for _, key := range []string{"wait_time", "latency_goal"} {
		was[key] = models[at].Policy[key]
	}
	if err := r.admin.Set(ctx, r.o.Model, policy.Policy{"wait_time": "0", "latency_goal": "0"}); err != nil {
		return nil, fmt.Errorf("measuring takes wait_time = 0 for its time: %w", err)
	}
	return func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 30*time.Second)
		defer cancel()
		_ = r.admin.Set(ctx, r.o.Model, was) // fails only if the broker is gone
	}, nil
}

// measure loads the model for one kind in one round.
func (r *run) measure(ctx context.Context, c Kind) error {
	before, err := r.admin.Batches(ctx, r.o.Model, math.MaxInt64)
	if err != nil {
		return err
	}
	inputs := make([]any, 0, 4)
	for _, t := range r.feed.Rows(0, c.Rows) {
		inputs = append(inputs, t)
	}
	end := time.Now().Add(r.spread)
	errs := make([]error, c.Busy)
	var failed atomic.Bool // then the others finish their requests in flight
	var wg sync.WaitGroup
	for i := range c.Busy {
		wg.Go(func() {
			for n := 0; !failed.Load() && ctx.Err() == nil && (n <= leastBatches || time.Now().Before(end)); n++ {
				if errs[i] = once(ctx, r.clients[i], inputs); errs[i] != nil {
					failed.Store(true)
				}
			}
		})
	}
	done := make(chan struct{})
	go func() { wg.Wait(); close(done) }()
	read := r.follow(ctx, before.Count, done)
	<-done
	for _, err := range errs {
		if err != nil && !errors.Is(err, context.Canceled) {
			return &BatchError{c.Rows, c.Busy, err}
		}
	}
	if read != nil {
		return read
	}
	return ctx.Err()
}

func once(ctx context.Context, c *client.Client, inputs []any) error {
	q, err := c.Fill(ctx, inputs...)
	if err != nil {
		return err
	}
	defer q.Release()
	if err := q.Commit(context.WithoutCancel(ctx)); err != nil {
		return err
	}
	return q.Wait(ctx)
}

// follow reads the broker's record, which has only the last thousand batches, until the
// load is over.
func (r *run) follow(ctx context.Context, since uint64, done <-chan struct{}) error {
	var run []stats.Batch // batches without a gap
	torn := false         // there is a gap before the run
	for last := false; ; {
		select {
		case <-done:
			last = true
		case <-time.After(20 * time.Millisecond):
		}
		b, err := r.admin.Batches(context.WithoutCancel(ctx), r.o.Model, since)
		if err != nil {
			return err
		}
		if b.Count-since > uint64(len(b.Batches)) { // the record has dropped some
			r.count(run, torn, true)
			run, torn = nil, true
		}
		since, run = b.Count, append(run, b.Batches...)
		if last {
			r.count(run, torn, false)
			return nil
		}
	}
}

// count files the batches of a run under their kinds. It leaves out the batches beside a
// gap: the record may lack batches that ran at the same time.
func (r *run) count(run []stats.Batch, gapBefore, gapAfter bool) {
	edge := 2 * r.profile.Workers
	first, end := 0, len(run)
	if gapBefore {
		first = edge
	}
	if gapAfter {
		end -= edge
	}
	for i := first; i < end; i++ {
		b := &run[i]
		took := max(1, b.FinishedUS-b.StartedUS)
		beside := int64(0)
		for j := i - 1; j >= 0 && (run[j].FinishedUS > b.StartedUS || j >= i-2*edge); j-- { // nearly in the order of their ends
			beside += overlap(b, &run[j])
		}
		for j := i + 1; j < len(run) && j <= i+2*edge; j++ {
			beside += overlap(b, &run[j])
		}
		busy := 1 + int(float64(beside)/float64(took)+0.5)
		at := Kind{b.Rows, busy}
		r.samples[at] = append(r.samples[at], float64(took)/1e3)
	}
}

func overlap(a, b *stats.Batch) int64 {
	if a.Worker == b.Worker {
		return 0
	}
	return max(0, min(a.FinishedUS, b.FinishedUS)-max(a.StartedUS, b.StartedUS))
}

// summarize makes a point of each kind that was seen often enough.
func (r *run) summarize() {
	for _, c := range r.cells {
		s := r.samples[c]
		if len(s) < leastBatches {
			if !r.profile.Unfinished {
				r.profile.Missing = append(r.profile.Missing, c)
			}
			continue
		}
		p := Point{Rows: c.Rows, Busy: c.Busy, Batches: len(s)}
		p.MS, p.Low, p.High = medianInterval(s)
		r.profile.Points = append(r.profile.Points, p)
	}
}
