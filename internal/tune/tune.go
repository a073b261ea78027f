// SPDX-License-Identifier: Apache-2.0

// Package tune finds how many instances of a worker command, and which
// max_batch_size, serve a load best:
//
//  1. a private broker starts the command and learns which model it serves;
//  2. what batches take is measured (package profile), by rows and busy workers;
//  3. every setting is simulated with that, and all but the best few are dropped;
//  4. those are measured under real load, in turns.
//
// All processes belong to the private broker and end with it.
package tune

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/bench"
	"github.com/ringbatch/ringbatch/internal/feed"
	"github.com/ringbatch/ringbatch/internal/profile"
	"github.com/ringbatch/ringbatch/internal/progress"
	"github.com/ringbatch/ringbatch/stats"
	"github.com/ringbatch/ringbatch/tensor"
)

// Options say what is tuned, and for what.
type Options struct {
	Program    []string // this program, to be started as a broker
	Command    string   // of a worker
	Model      string   // if it serves several
	GPUs       []int
	MPS        bool // try it with MPS, too
	Instances  []int
	Sizes      []int // max_batch_size; nil: 1, 2, 4 … what the worker asks for
	Goal       Goal
	Feed       func(*tensor.Signature) (*feed.Feed, error)
	AttachTime time.Duration // for a worker to come up
	Profile    time.Duration // what profiling may take
	Window     time.Duration // of load, measured at a time
	Turns      int           // in which each of the best is measured, with the others in between
	Full       bool          // measure every setting, to judge the choice
	Say        *progress.Line
}

// Goal is what is asked for. Without a rate the best setting is the one with the
// most requests per second, with one it is the one with the least mean latency;
// p99, if it is given, must be kept.
type Goal struct {
	P99  time.Duration `json:"p99_ns,omitempty"`
	Rate float64       `json:"rate,omitempty"`
}

// Setting is one way to serve the model.
type Setting struct {
	Instances    int  `json:"instances"`
	MaxBatchSize int  `json:"max_batch_size"`
	MPS          bool `json:"mps,omitempty"`
}

func (s Setting) String() string {
	text := fmt.Sprintf("%d × %d", s.Instances, s.MaxBatchSize)
	if s.MPS {
		text += " MPS"
	}
	return text
}

// Candidate is a setting and what is known of it.
type Candidate struct {
	Setting
	InFlight  int       `json:"in_flight,omitempty"` // closed loop: requests
	Predicted *Figures  `json:"predicted,omitempty"`
	Measured  *Measured `json:"measured,omitempty"`
	Note      string    `json:"note,omitempty"` // why it does not count

	ways    []way
	absent  bool          // does not come up
	full    time.Duration // a full batch, with all instances busy
	samples []bench.Figures
	errors  map[string]int64
}

// Figures are the main ones.
type Figures struct {
	PerSecond float64 `json:"requests_per_s"`
	MeanMS    float64 `json:"mean_ms"`
	P99MS     float64 `json:"p99_ms"`

	least float64 // requests per second that had to be answered
}

// Report is everything that was found out.
type Report struct {
	Command    string             `json:"command"`
	Model      string             `json:"model"`
	Goal       Goal               `json:"goal"`
	Profiles   []*profile.Profile `json:"profiles"`
	Candidates []*Candidate       `json:"candidates"`
	Choice     *Setting           `json:"choice,omitempty"`
	Why        string             `json:"why,omitempty"` // it is the choice
	Seconds    float64            `json:"seconds"`       // until the choice
	Notes      []string           `json:"notes,omitempty"`
	Unfinished bool               `json:"unfinished,omitempty"`
	Grid       *Grid              `json:"grid,omitempty"`

	options  *Options
	declared declaration
	// workersEach is how many workers an instance is.
	workersEach int
	whole       bool // measures every setting to the end
	missed      int  // measurements in which the goal was not kept, and others followed
}

// Grid is what measuring every setting gave, with --full.
type Grid struct {
	Settings int     `json:"settings"`
	Seconds  float64 `json:"seconds"`
	Best     Setting `json:"best"`
	// Ratio is how much worse the choice is than the best: 1 is as good. Both were
	// measured once more, in turns.
	Ratio float64 `json:"ratio"`
}

// Run tunes. What was measured comes with an error, too. Every process below this one
// that was not there before counts as started by it, and has ended when it returns.
func Run(ctx context.Context, o Options) (*Report, error) {
	spareInherited()
	if err := adoptOrphans(); err != nil {
		return nil, err
	}
	defer context.AfterFunc(ctx, func() { o.Say.Say("ending what was started; Ctrl-C once more kills it") })()
	r, err := run(ctx, o)
	if err != nil && ctx.Err() != nil { // whatever failed, it is why
		err = ctx.Err()
	}
	return r, err
}

func run(ctx context.Context, o Options) (*Report, error) {
	r := &Report{Command: o.Command, Goal: o.Goal, options: &o}
	begin := time.Now()
	b, err := r.discover(ctx, begin)
	if err != nil {
		return nil, err
	}
	for _, mps := range r.variants() {
		if b == nil {
			if b, err = startBroker(&o, r.config(mps, r.most(), r.maxSize())); err != nil {
				return r, err
			}
		}
		err := r.tune(ctx, b, mps, begin)
		b.stop()
		b = nil
		if err != nil {
			r.finish(begin)
			r.Unfinished = ctx.Err() != nil
			return r, err
		}
	}
	r.finish(begin)
	if o.Full {
		if err := r.measureGrid(ctx); err != nil {
			return r, err
		}
	}
	return r, r.verdict()
}

// variants are with and without MPS.
func (r *Report) variants() []bool {
	if r.options.MPS {
		return []bool{false, true}
	}
	return []bool{false}
}

func (r *Report) finish(begin time.Time) {
	if r.Choice = r.choose(); r.Choice != nil {
		r.Why = r.why()
	}
	if r.Seconds == 0 {
		r.Seconds = time.Since(begin).Seconds()
	}
}

// tune profiles, predicts and verifies, with or without MPS.
func (r *Report) tune(ctx context.Context, b *private, mps bool, begin time.Time) error {
	most, err := r.scaleUp(ctx, b)
	if err != nil {
		return err
	}
	if mps {
		s, err := admin.New(b.socket).Stats(ctx)
		if err != nil {
			return b.explain(err)
		}
		if why, missing := strings.CutPrefix(s.MPS, stats.NoMPS); missing {
			r.Notes = append(r.Notes, "MPS was not tried: "+why)
			r.options.MPS = false
			return nil
		}
	}
	p, err := r.profile(ctx, b, mps, most, begin)
	if p != nil && len(p.Points) > 0 {
		r.Profiles = append(r.Profiles, p)
	}
	if err != nil {
		return b.explain(err)
	}
	if err := r.checkGoal(p); err != nil {
		return err
	}
	r.say(begin, "simulating")
	if err := r.countWorkers(ctx, b, most); err != nil {
		return b.explain(err)
	}
	list, err := r.predict(ctx, p, mps, most)
	if err != nil {
		return err
	}
	r.Candidates = append(r.Candidates, list...)
	return r.verifyBest(ctx, b, list, begin)
}

// secondChances is how often other settings and lighter loads are measured, if none that
// was measured kept the p99 that was simulated for it.
const secondChances = 3

// verifyBest measures the best few under real load; and the next, where these do not keep
// the goal. A real machine has a longer tail than a simulated one: how much longer, is known then.
func (r *Report) verifyBest(ctx context.Context, b *private, list []*Candidate, begin time.Time) error {
	share := margin
	for range 1 + secondChances {
		finalists := r.finalists(list, share)
		if err := r.verify(ctx, b, finalists, begin); err != nil {
			return err
		}
		if r.Goal.P99 == 0 || len(finalists) == 0 || r.choose() != nil {
			break
		}
		share = r.shareKept(finalists, share)
		r.missed += len(finalists)
		for _, c := range list {
			before := *c
			if c.take(r, share); before.Measured != nil && c.Measured == nil {
				r.Notes = append(r.Notes, r.didNotKeep(&before))
			}
		}
	}
	return nil
}

// didNotKeep is the note about a load that is not measured again.
func (r *Report) didNotKeep(c *Candidate) string {
	text := fmt.Sprintf("%s%s did not keep the goal: %s requests/s, p99 %s ms", c.Setting, r.load(c), number(c.Measured.PerSecond), number(c.Measured.P99MS))
	if c.Note != "" {
		text += "; " + c.Note
	}
	return text
}

// shareKept is within which share of the goal p99 must be simulated to be kept, from
// settings that did not.
func (r *Report) shareKept(measured []*Candidate, share float64) float64 {
	least := math.Inf(1) // times the simulated one
	for _, c := range measured {
		if c.Measured != nil && c.Measured.P99MS > 0 && c.Predicted.P99MS > 0 {
			least = min(least, c.Measured.P99MS/c.Predicted.P99MS)
		}
	}
	return min(0.7*share, margin/least)
}

// profile measures what batches take, without those that fail: they may have no
// room on the GPU, or none beside those of other instances.
func (r *Report) profile(ctx context.Context, b *private, mps bool, most int, begin time.Time) (*profile.Profile, error) {
	p, err := profile.Measure(ctx, profile.Options{
		Socket: b.socket, Model: r.Model, Feed: r.options.Feed, Sizes: r.sizes(), Busy: profile.Doubling(most), Time: r.options.Profile / time.Duration(len(r.variants())),
		Progress: func(share float64, doing string) {
			r.say(begin, "profile %3.0f %%: %s, then about %v under load", 100*share, doing, r.underLoad(most).Round(time.Second))
		},
		Recover:  func(ctx context.Context) error { return b.ready(ctx, r.Model, most) },
		Patience: r.options.patience(),
	})
	if p != nil {
		for _, e := range p.Failed {
			r.Notes = append(r.Notes, leftOut(e, mps))
		}
		if len(p.Failed) == 0 { // else it is known what they died of
			r.Notes = append(r.Notes, p.Notes()...)
		}
	}
	return p, err
}

// patience is for workers to come back: as long as they may take to come up.
func (o *Options) patience() profile.Patience {
	return profile.Patience{Time: o.AttachTime, Starting: o.AttachTime}
}

// countWorkers finds out how many workers an instance is: a command may start several.
func (r *Report) countWorkers(ctx context.Context, b *private, instances int) error {
	n, _, err := profile.Workers(ctx, admin.New(b.socket), r.Model)
	if err != nil {
		return err
	}
	if n >= 2*instances && r.workersEach == 0 {
		r.Notes = append(r.Notes, fmt.Sprintf("each instance is %d workers", n/instances))
	}
	r.workersEach = max(1, n/instances)
	return nil
}

// underLoad is about what measuring takes when the profile is known.
func (r *Report) underLoad(most int) time.Duration {
	settings := 0
	for _, n := range profile.Ascending(r.options.Instances) {
		if n <= most {
			settings += len(r.sizes())
		}
	}
	return time.Duration(mostMeasured(settings)*r.options.Turns) * r.turnTime(&Candidate{})
}

// leftOut is the note about batches that fail.
func leftOut(e *profile.BatchError, mps bool) string {
	text := fmt.Sprintf("batches of %d rows and more were left out", e.Rows)
	if e.Busy > 1 {
		text += fmt.Sprintf(" with %d instances at once and more", e.Busy)
	}
	if mps {
		text += ", with MPS"
	}
	return text + ": " + firstLine(e.Err)
}

// checkGoal refuses a goal that a single batch does not keep.
func (r *Report) checkGoal(p *profile.Profile) error {
	if goal := r.Goal.P99; goal > 0 && p.Shortest() > goal {
		return fmt.Errorf("--p99 %v cannot be kept: the quickest batch alone takes %v", goal, p.Shortest().Round(10*time.Microsecond))
	}
	return nil
}

func (r *Report) say(begin time.Time, format string, a ...any) {
	r.options.Say.Say("%v  %s", time.Since(begin).Round(time.Second), fmt.Sprintf(format, a...))
}

// sizes are the batch sizes that are tried.
func (r *Report) sizes() []int {
	if len(r.options.Sizes) > 0 {
		return profile.Ascending(r.options.Sizes)
	}
	return profile.Doubling(r.declared.maxBatchSize)
}

func (r *Report) maxSize() int { return slices.Max(r.sizes()) }

// most is how many instances are tried at most.
func (r *Report) most() int { return slices.Max(r.options.Instances) }

// scaleUp waits for as many instances as are to be tried, which start together.
// If they do not all come up it goes up from one to as many as do.
func (r *Report) scaleUp(ctx context.Context, b *private) (int, error) {
	switch err := b.up(ctx, r.most()); {
	case err == nil || ctx.Err() != nil:
		return r.most(), ctx.Err()
	case errors.Is(err, errBackground):
		return 0, err
	}
	if err := b.scale(ctx, r.Model, 1); err != nil {
		return 0, err
	}
	up := 1
	for _, n := range profile.Ascending(r.options.Instances) {
		if n == 1 {
			continue
		}
		if err := b.scale(ctx, r.Model, n); err != nil {
			if ctx.Err() != nil {
				return 0, ctx.Err()
			}
			r.Notes = append(r.Notes, fmt.Sprintf("%d instances do not come up: %v", n, b.explain(err)))
			_ = b.scale(ctx, r.Model, up)
			break
		}
		up = n
	}
	return up, nil
}

// verdict is why there is no recommendation, if there is none.
func (r *Report) verdict() error {
	if r.Choice != nil {
		return nil
	}
	if len(r.Candidates) == 0 && len(r.Notes) > 0 {
		return fmt.Errorf("no setting is left to measure: %s", strings.Join(r.Notes, "; "))
	}
	what := "no setting that was measured served the load without errors"
	switch {
	case r.Goal.Rate > 0 && r.Goal.P99 > 0:
		what = fmt.Sprintf("no setting that was measured serves %s requests/s with p99 within %v", number(r.Goal.Rate), r.Goal.P99)
	case r.Goal.Rate > 0:
		what = fmt.Sprintf("no setting that was measured serves %s requests/s", number(r.Goal.Rate))
	case r.Goal.P99 > 0:
		what = fmt.Sprintf("no setting that was measured keeps p99 within %v", r.Goal.P99)
	}
	return errors.New(what + "; the table shows how near each one came")
}
