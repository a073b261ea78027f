// SPDX-License-Identifier: Apache-2.0

// Package tune finds how many instances of a worker command, and which max_batch_size, serve a load best, by successive halving:
//
//  1. a private broker starts the command and learns which model it serves;
//  2. every setting is measured under real load for one window;
//  3. the worse half is dropped, the rest is measured for another window, and so on, until two are left.
//
// All processes belong to the private broker and end with it.
package tune

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/admin/stats"
	"github.com/ringbatch/ringbatch/bench"
	"github.com/ringbatch/ringbatch/internal/progress"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/tools/feed"
	"github.com/ringbatch/ringbatch/tools/profile"
)

// Options are the command line.
type Options struct {
	Program    []string // this program, to be started as a broker
	Command    string   // of a worker
	Model      string   // if it serves several
	GPUs       []int
	MPS        bool // try it with MPS, too
	Instances  []int
	Sizes      []int // max_batch_size; nil: 1, 2, 4 … the worker's own
	Goal       Goal
	Feed       func(*tensor.Signature) (*feed.Feed, error)
	AttachTime time.Duration // for a worker to come up
	Window     time.Duration // of load, measured at a time
	Say        *progress.Line
}

// Goal: without a rate the best setting has the most requests per second, with one it has the least mean latency. A p99 must
// be kept.
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
	text := fmt.Sprintf("%d instance(s), max_batch_size %d", s.Instances, s.MaxBatchSize)
	if s.MPS {
		text += ", with MPS"
	}
	return text
}

// Candidate is a setting with a load, and its figures.
type Candidate struct {
	Setting
	// Load of a closed loop: requests in flight, in full batches of every worker. 0: an open loop at the rate.
	Load     float64  `json:"load,omitempty"`
	Measured *Figures `json:"measured,omitempty"`
	Note     string   `json:"note,omitempty"` // why it does not count
}

// Figures are means over windows.
type Figures struct {
	PerSecond float64 `json:"requests_per_s"`
	MeanMS    float64 `json:"mean_ms"`
	P99MS     float64 `json:"p99_ms"`
	Due       float64 `json:"due_per_s,omitempty"` // open loop
	Windows   int     `json:"windows"`
}

// Report is everything that was found out.
type Report struct {
	Command    string       `json:"command"`
	Model      string       `json:"model"`
	Goal       Goal         `json:"goal"`
	Candidates []*Candidate `json:"candidates"`
	Choice     *Setting     `json:"choice,omitempty"`
	Why        string       `json:"why,omitempty"`
	Seconds    float64      `json:"seconds"`
	Notes      []string     `json:"notes,omitempty"`
	Unfinished bool         `json:"unfinished,omitempty"`

	options  *Options
	declared declaration
	begin    time.Time
}

const (
	leastWindows = 3    // of the last two settings
	leastWarmup  = 0.3  // of a window
	served       = 0.97 // of the requests must be answered
	alike        = 0.98 // settings within that count as equally good
	openClients  = 16
	mostInFlight = 2 // full batches of each worker: one runs, the next waits
)

// Run tunes. It returns the figures so far with an error, and ends every process that it started.
func Run(ctx context.Context, o Options) (*Report, error) {
	defer context.AfterFunc(ctx, func() { o.Say.Say("ending what was started; Ctrl-C once more kills it") })()
	r := &Report{Command: o.Command, Goal: o.Goal, options: &o, begin: time.Now()}
	err := r.discover(ctx)
	if err == nil {
		err = r.halve(ctx)
		r.choose()
	}
	r.Seconds = time.Since(r.begin).Seconds()
	if err != nil && ctx.Err() != nil { // the reason of any other failure
		err, r.Unfinished = ctx.Err(), true
	}
	if err == nil && r.Choice == nil {
		err = r.noChoice()
	}
	return r, err
}

func (r *Report) say(format string, a ...any) {
	r.options.Say.Say("%v  %s", time.Since(r.begin).Round(time.Second), fmt.Sprintf(format, a...))
}

// sizes are the batch sizes to try.
func (r *Report) sizes() []int {
	if len(r.options.Sizes) > 0 {
		return profile.Ascending(r.options.Sizes)
	}
	return profile.Doubling(r.declared.maxBatchSize)
}

// loads to try. Where p99 has to be kept, a closed loop with fewer requests in flight may keep it.
func (r *Report) loads() []float64 {
	switch {
	case r.Goal.Rate > 0:
		return []float64{0}
	case r.Goal.P99 > 0:
		return []float64{0.5, 1, mostInFlight}
	}
	return []float64{mostInFlight}
}

// halve measures all settings, then the better half of them, and so on.
func (r *Report) halve(ctx context.Context) error {
	variants := []bool{false}
	if r.options.MPS {
		variants = append(variants, true)
	}
	for _, mps := range variants {
		for _, n := range profile.Ascending(r.options.Instances) {
			for _, size := range r.sizes() {
				for _, load := range r.loads() {
					r.Candidates = append(r.Candidates, &Candidate{Setting: Setting{n, size, mps}, Load: load})
				}
			}
		}
	}
	list := slices.Clone(r.Candidates)
	for round := 1; ; round++ {
		for _, mps := range variants {
			of := slices.DeleteFunc(slices.Clone(list), func(c *Candidate) bool { return c.MPS != mps })
			if err := r.measureAll(ctx, mps, of, round); err != nil {
				return err
			}
		}
		list = slices.DeleteFunc(list, func(c *Candidate) bool { return c.Note != "" })
		slices.SortStableFunc(list, r.compare)
		if len(list) > 2 {
			list = list[:(len(list)+1)/2]
		} else if round >= leastWindows {
			return nil
		}
	}
}

// measureAll measures each setting for one window, fewer instances first, so that few processes start.
func (r *Report) measureAll(ctx context.Context, mps bool, list []*Candidate, round int) error {
	if len(list) == 0 {
		return nil
	}
	b, err := startBroker(r.options, r.config(Setting{1, slices.Max(r.sizes()), mps}))
	if err != nil {
		return err
	}
	defer b.stop()
	if err := b.ready(ctx, r.Model, 1); err != nil {
		return err
	}
	if s, err := admin.New(b.socket).Stats(ctx); err != nil {
		return b.explain(err)
	} else if why, missing := strings.CutPrefix(s.MPS, stats.NoMPS); mps && missing {
		for _, c := range list {
			c.Note = "MPS was not tried: " + why
		}
		r.Notes = append(r.Notes, list[0].Note)
		return nil
	}
	slices.SortStableFunc(list, func(a, b *Candidate) int { return cmp.Compare(a.Instances, b.Instances) })
	for i, c := range list {
		r.say("round %d: measuring %s (%d of %d)", round, c.Setting, i+1, len(list))
		if err := r.measure(ctx, b, c, round); err != nil {
			return err
		}
	}
	return nil
}

// measure is one window of a setting.
func (r *Report) measure(ctx context.Context, b *private, c *Candidate, round int) error {
	workers, err := b.scale(ctx, r.Model, c.Instances)
	if err != nil {
		if c.Note = "does not come up: " + firstLine(err); c.Instances == 1 || ctx.Err() != nil {
			return b.explain(err)
		}
		return nil
	}
	if err := admin.New(b.socket).Set(ctx, r.Model, policy.New(policy.MaxBatchSize(c.MaxBatchSize))); err != nil {
		return b.explain(err)
	}
	l := bench.Load{
		Socket: b.socket, Model: r.Model, Feed: r.options.Feed, Rows: 1, Rate: r.Goal.Rate, Clients: openClients,
		Warmup: time.Duration(leastWarmup * float64(r.options.Window)), Window: r.options.Window, Windows: 1, Seed: int64(round),
		Patience: profile.Patience{Time: r.options.AttachTime, Starting: r.options.AttachTime},
	}
	if c.Load > 0 {
		inFlight := max(1, int(math.Round(c.Load*float64(workers*c.MaxBatchSize))))
		l.Clients = min(inFlight, 2*openClients)
		l.InFlight = (inFlight + l.Clients - 1) / l.Clients
	}
	before := b.isolated(ctx, r.Model)
	result, err := l.Run(ctx, &progress.Line{})
	if result != nil {
		c.add(result, r.options.Window)
	}
	if c.Note == "" && b.isolated(ctx, r.Model) > before {
		c.Note = "errors: batches failed as a whole, and ran again in smaller ones"
	}
	switch {
	case errors.Is(err, progress.ErrInterrupted):
		return context.Canceled
	case err != nil:
		return b.explain(err)
	}
	return nil
}

func firstLine(err error) string {
	line, _, _ := strings.Cut(err.Error(), "\n")
	return line
}

// add takes in another window.
func (c *Candidate) add(r *bench.Result, window time.Duration) {
	delete(r.Errors, "not_sent_in_time") // the rate is judged by itself
	if len(r.Errors) > 0 {
		c.Note = "errors: " + strings.Join(slices.Sorted(maps.Keys(r.Errors)), ", ")
	}
	if c.Measured == nil {
		c.Measured = &Figures{}
	}
	m := c.Measured
	for _, w := range r.Each {
		n := float64(m.Windows)
		mean := func(before, now float64) float64 { return (before*n + now) / (n + 1) }
		if share := w.PerSecond / max(m.PerSecond*n+w.PerSecond, 1e-9); share > 0 { // without answers there is no latency
			m.MeanMS, m.P99MS = m.MeanMS+share*(w.MeanMS-m.MeanMS), m.P99MS+share*(w.P99MS-m.P99MS)
		}
		m.PerSecond = mean(m.PerSecond, w.PerSecond)
		// Requests that came shortly before the end of a window could not be answered in it.
		late := min(w.DuePerSecond*w.MeanMS/1e3/window.Seconds(), w.DuePerSecond/10) + 1/window.Seconds()
		m.Due = mean(m.Due, max(0, w.DuePerSecond-late))
		m.Windows++
	}
}

// keeps reports whether the figures keep the goal.
func (r *Report) keeps(f *Figures) bool {
	return f.PerSecond > 0 && (r.Goal.P99 == 0 || f.P99MS <= float64(r.Goal.P99)/1e6) && (r.Goal.Rate == 0 || f.PerSecond >= served*f.Due)
}

// score compares settings: more is better.
func (r *Report) score(f *Figures) float64 {
	if r.Goal.Rate > 0 && f.PerSecond > 0 { // without answers there is no latency
		return 1 / max(f.MeanMS, 1e-9)
	}
	return f.PerSecond
}

// compare sorts the best first: settings that keep the goal, by score; then the nearest to it.
func (r *Report) compare(a, b *Candidate) int {
	ka, kb := r.keeps(a.Measured), r.keeps(b.Measured)
	switch {
	case ka != kb && ka:
		return -1
	case ka != kb:
		return 1
	case !ka && r.Goal.P99 > 0:
		return cmp.Compare(a.Measured.P99MS, b.Measured.P99MS)
	}
	return cmp.Compare(r.score(b.Measured), r.score(a.Measured))
}

// choose takes the best of the settings that were measured longest and keep the goal. Of equally good ones it takes the fewest
// instances, then smaller batches, whose latency is less.
func (r *Report) choose() {
	var list []*Candidate
	longest := 0
	for _, c := range r.Candidates {
		if c.Measured != nil && c.Note == "" && r.keeps(c.Measured) {
			list = append(list, c)
			longest = max(longest, c.Measured.Windows)
		}
	}
	list = slices.DeleteFunc(list, func(c *Candidate) bool { return c.Measured.Windows < longest })
	if len(list) == 0 {
		return
	}
	slices.SortStableFunc(list, r.compare)
	choice := list[0]
	for _, c := range list[1:] {
		equal := r.score(c.Measured) >= alike*r.score(list[0].Measured)
		if equal && cmp.Or(cmp.Compare(c.Instances, choice.Instances), cmp.Compare(c.MaxBatchSize, choice.MaxBatchSize)) < 0 {
			choice = c
		}
	}
	r.Choice = &choice.Setting
	r.Why = fmt.Sprintf("%s, the best of %d measured", r.figuresText(choice), len(r.Candidates))
	if len(list) > 1 {
		other := list[0]
		if other == choice {
			other = list[1]
		}
		r.Why += fmt.Sprintf("; next: %s with %s", other.Setting, r.figuresText(other))
	}
}

// noChoice says why there is no recommendation.
func (r *Report) noChoice() error {
	what := "served the load without errors"
	switch {
	case r.Goal.Rate > 0 && r.Goal.P99 > 0:
		what = fmt.Sprintf("serves %s requests/s with p99 within %v", number(r.Goal.Rate), r.Goal.P99)
	case r.Goal.Rate > 0:
		what = fmt.Sprintf("serves %s requests/s", number(r.Goal.Rate))
	case r.Goal.P99 > 0:
		what = fmt.Sprintf("keeps p99 within %v", r.Goal.P99)
	}
	return fmt.Errorf("no setting that was measured %s; the table shows how near each one came", what)
}
