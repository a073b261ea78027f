// SPDX-License-Identifier: Apache-2.0

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
	"github.com/ringbatch/ringbatch/bench"
	"github.com/ringbatch/ringbatch/internal/progress"
	"github.com/ringbatch/ringbatch/internal/testbed"
	"github.com/ringbatch/ringbatch/policy"
)

// Measured is what a setting did under load: means over windows, and the 95 %
// intervals of these means (Student's t).
type Measured struct {
	Figures
	PerSecondLow  float64 `json:"requests_per_s_low"`
	PerSecondHigh float64 `json:"requests_per_s_high"`
	MeanLow       float64 `json:"mean_ms_low"`
	MeanHigh      float64 `json:"mean_ms_high"`
	Windows       int     `json:"windows"`
}

const (
	windowsATurn  = 2
	leastWarmup   = 300 * time.Millisecond
	warmupBatches = 3    // full ones: until as many are answered as come
	hopelessAfter = 0.85 // of the best score: not measured further
)

// Requests is how many each of the best few is measured with, at a rate.
func (o *Options) Requests() float64 {
	return o.Goal.Rate * windowsATurn * float64(o.Turns) * o.Window.Seconds()
}

// warmup is what is not measured at the beginning of a turn.
func (c *Candidate) warmup() time.Duration { return max(leastWarmup, warmupBatches*c.full) }

// afresh is the setting with nothing measured.
func (c *Candidate) afresh() *Candidate {
	return &Candidate{Setting: c.Setting, InFlight: c.InFlight, full: c.full}
}

// verify measures settings under real load, in turns; or one after the other, if
// starting instances once more takes longer than a turn. Then what falls behind
// is left at once. In the first turn others may join in (underrated).
func (r *Report) verify(ctx context.Context, b *private, list []*Candidate, begin time.Time) error {
	phase, turns, inARow := time.Now(), r.options.Turns, 1
	if len(list) > 0 && b.starting > largest(list, (*Candidate).warmup)+windowsATurn*r.options.Window {
		turns, inARow = 1, turns
	}
	list = slices.Clone(list)
	done := 0
	for turn := range turns {
		slices.SortStableFunc(list, func(a, b *Candidate) int { // to and fro: fewer changes of instances
			if turn%2 == 0 {
				return cmp.Compare(b.Instances, a.Instances)
			}
			return cmp.Compare(a.Instances, b.Instances)
		})
		for i := 0; i < len(list); i++ {
			c := list[i]
			each := time.Duration(inARow) * r.turnTime(c)
			if done > 0 {
				each = time.Since(phase) / time.Duration(done)
			}
			left := each * time.Duration((turns-turn)*len(list)-i)
			r.say(begin, "measuring %s (%d of %d, turn %d of %d); %v left", c.Setting, i+1, len(list), turn+1, turns, left.Round(time.Second))
			for again := range inARow {
				if err := r.measure(ctx, b, c, turn+again); err != nil {
					return err
				}
				if !slices.Contains(r.hopeful(list), c) {
					break
				}
			}
			done++
			if turn == 0 && i == len(list)-1 && !r.whole {
				list = append(list, r.underrated(list)...)
			}
		}
		list = r.hopeful(list)
	}
	return nil
}

// turnTime is about what one turn of a setting takes.
func (r *Report) turnTime(c *Candidate) time.Duration {
	return c.warmup() + windowsATurn*r.options.Window
}

// underrated is the best setting that was not measured, and of which more is simulated than
// the best has done that was measured: a simulation knows nothing of what clients and
// broker take, so that where it promises more than there is, it has ruled out too much.
// There is none if as many were measured as may be.
func (r *Report) underrated(measured []*Candidate) []*Candidate {
	best := 0.0
	instances := map[int]bool{}
	for _, c := range measured {
		if c.Measured != nil && c.Note == "" && r.keeps(&c.Measured.Figures, 1) {
			best = max(best, r.score(&c.Measured.Figures))
		}
		instances[c.Instances] = true
	}
	var others []*Candidate
	all := 0
	for _, c := range r.Candidates {
		if c.MPS != measured[0].MPS {
			continue
		}
		all++
		if c.Measured == nil && c.Note == "" && r.keeps(c.Predicted, margin) && r.score(c.Predicted) > best {
			others = append(others, c)
		}
	}
	if best == 0 || len(others) == 0 || len(measured) >= mostMeasured(all) {
		return nil
	}
	slices.SortStableFunc(others, func(a, b *Candidate) int { // another number of instances first
		switch {
		case !instances[a.Instances] && instances[b.Instances]:
			return -1
		case instances[a.Instances] && !instances[b.Instances]:
			return 1
		}
		return cmp.Compare(r.score(b.Predicted), r.score(a.Predicted))
	})
	return others[:1]
}

// hopeful drops what is clearly worse than the best: by a lot, or a little in
// every single window.
func (r *Report) hopeful(list []*Candidate) []*Candidate {
	best, worstOfBest := 0.0, 0.0
	for _, c := range list {
		if c.Measured != nil && c.Note == "" && r.keeps(&c.Measured.Figures, 1) && r.score(&c.Measured.Figures) > best {
			best = r.score(&c.Measured.Figures)
			worstOfBest, _ = r.scores(c)
		}
	}
	return slices.DeleteFunc(slices.Clone(list), func(c *Candidate) bool {
		if c.Note != "" || c.Measured == nil || r.whole {
			return c.Note != ""
		}
		_, high := r.scores(c)
		return r.score(&c.Measured.Figures) < hopelessAfter*best || high < alike*worstOfBest
	})
}

// scores are the lowest and the highest of a setting's windows.
func (r *Report) scores(c *Candidate) (low, high float64) {
	low = math.Inf(1)
	for _, w := range c.samples {
		score := r.score(&Figures{PerSecond: w.PerSecond, MeanMS: w.MeanMS, P99MS: w.P99MS})
		low, high = min(low, score), max(high, score)
	}
	return low, high
}

// measure is one turn of a setting.
func (r *Report) measure(ctx context.Context, b *private, c *Candidate, turn int) error {
	if err := b.scale(ctx, r.Model, c.Instances); err != nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		c.Note, c.absent = "does not come up: "+firstLine(err), true
		return nil
	}
	if err := admin.New(b.socket).Set(ctx, r.Model, policy.New(policy.MaxBatchSize(c.MaxBatchSize))); err != nil {
		return b.explain(err)
	}
	l := bench.Load{
		Socket: b.socket, Model: r.Model, Feed: r.options.Feed, Rows: 1, Rate: r.Goal.Rate, Clients: openClients,
		Warmup: c.warmup(), Window: r.options.Window, Windows: windowsATurn, Seed: int64(turn + 1), Patience: r.options.patience(),
	}
	if l.Rate == 0 {
		l.Clients, l.InFlight = clientsOf(c.InFlight)
	}
	before := b.restarts(ctx)
	result, err := l.Run(ctx, &progress.Line{})
	if result != nil {
		c.add(result, r.options.Window)
	}
	if n := b.restarts(ctx) - before; n > 0 {
		r.Notes = append(r.Notes, fmt.Sprintf("%d worker process(es) ended by themselves while %s was measured, and were started again", n, c.Setting))
	}
	if errors.Is(err, testbed.ErrInterrupted) {
		return context.Canceled
	}
	if err != nil {
		return b.explain(err)
	}
	return nil
}

func firstLine(err error) string {
	line, _, _ := strings.Cut(err.Error(), "\n")
	return line
}

// add counts another turn, of windows of that length.
func (c *Candidate) add(r *bench.Result, window time.Duration) {
	c.samples = append(c.samples, r.Each...)
	if c.errors == nil {
		c.errors = map[string]int64{}
	}
	for name, n := range r.Errors {
		if name != "not_sent_in_time" { // that is the rate, which is judged by itself
			c.errors[name] += n
		}
	}
	if len(c.errors) > 0 {
		c.Note = fmt.Sprintf("errors: %s", strings.Join(slices.Sorted(maps.Keys(c.errors)), ", "))
	}
	m := &Measured{Windows: len(c.samples)}
	var due, rate, mean, p99 []float64
	for _, s := range c.samples {
		due, rate = append(due, s.DuePerSecond), append(rate, s.PerSecond)
		if s.PerSecond > 0 { // where nothing was answered there is no latency
			mean, p99 = append(mean, s.MeanMS), append(p99, s.P99MS)
		}
	}
	m.PerSecond, m.PerSecondLow, m.PerSecondHigh = meanInterval(rate)
	m.MeanMS, m.MeanLow, m.MeanHigh = meanInterval(mean)
	m.P99MS, _, _ = meanInterval(p99)
	// Of those that came, as chance would have it, not of the rate.
	came, _, _ := meanInterval(due)
	m.least = max(0, served*came-c.late(came, len(c.samples), window))
	c.Measured = m
}

// late is how many of the requests that came in a second may have been answered
// after the end of what was measured, and yet the rate was served: one of all; or, if
// it is known from the profile that the setting does as many, one of each window,
// or those that come while a batch runs, but no more than a fifth: what was measured
// is to confirm the profile.
func (c *Candidate) late(came float64, windows int, window time.Duration) float64 {
	one := 1 / (float64(windows) * window.Seconds())
	if capacity := float64(c.Instances*c.MaxBatchSize) / c.full.Seconds(); c.full == 0 || capacity < came {
		return one
	}
	return max(one, min(max(1, came*c.full.Seconds()/float64(windows))/window.Seconds(), came/5))
}

// largest of what the candidates have.
func largest[T cmp.Ordered](list []*Candidate, of func(*Candidate) T) T {
	most := of(list[0])
	for _, c := range list {
		most = max(most, of(c))
	}
	return most
}

// meanInterval is the mean and its 95 % interval, of numbers that are not negative.
func meanInterval(v []float64) (mean, low, high float64) {
	if len(v) == 0 {
		return 0, 0, 0
	}
	n := float64(len(v))
	for _, x := range v {
		mean += x / n
	}
	if len(v) < 2 {
		return mean, mean, mean
	}
	sum := 0.0
	for _, x := range v {
		sum += (x - mean) * (x - mean)
	}
	half := student(len(v)-1) * math.Sqrt(sum/(n-1)/n)
	return mean, max(0, mean-half), mean + half
}

// student is the 97.5 % quantile of Student's t distribution.
func student(degrees int) float64 {
	table := []float64{12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086}
	if degrees <= len(table) {
		return table[degrees-1]
	}
	return 1.96 + 2.4/float64(degrees)
}

// alike is within which two settings count as equally good: then the one with
// fewer instances is chosen, and then the one with smaller batches, whose latency
// is less, or at a given rate with larger ones, which have more to spare.
const alike = 0.98

// choose is the best of what was measured and kept the goal.
func (r *Report) choose() *Setting {
	var list []*Candidate
	best := 0.0
	for _, c := range r.Candidates {
		if c.Measured != nil && c.Note == "" && r.keeps(&c.Measured.Figures, 1) {
			list = append(list, c)
			best = max(best, r.score(&c.Measured.Figures))
		}
	}
	smaller := func(a, b *Candidate) int {
		if r.Goal.Rate > 0 {
			a, b = b, a
		}
		return cmp.Compare(a.MaxBatchSize, b.MaxBatchSize)
	}
	var choice *Candidate
	for _, c := range list {
		if r.score(&c.Measured.Figures) < alike*best {
			continue
		}
		if choice == nil || cmp.Or(cmp.Compare(c.Instances, choice.Instances), smaller(c, choice)) < 0 {
			choice = c
		}
	}
	if choice == nil {
		return nil
	}
	return &choice.Setting
}

func (r *Report) find(s Setting) *Candidate {
	for _, c := range r.Candidates {
		if c.Setting == s {
			return c
		}
	}
	return &Candidate{Setting: s}
}

// measureGrid measures every setting, and the choice against the best of them.
func (r *Report) measureGrid(ctx context.Context) error {
	if r.Choice == nil {
		return r.verdict()
	}
	begin := time.Now()
	grid := &Report{Command: r.Command, Model: r.Model, Goal: r.Goal, options: r.options, declared: r.declared, whole: true}
	for _, c := range r.Candidates {
		grid.Candidates = append(grid.Candidates, c.afresh())
	}
	run := func(list []*Candidate) error {
		for _, mps := range r.variants() {
			of := slices.DeleteFunc(slices.Clone(list), func(c *Candidate) bool { return c.MPS != mps })
			if len(of) == 0 {
				continue
			}
			most := largest(of, func(c *Candidate) int { return c.Instances })
			b, err := startBroker(r.options, r.config(mps, most, largest(of, func(c *Candidate) int { return c.MaxBatchSize })))
			if err != nil {
				return err
			}
			if err = b.up(ctx, most); err == nil {
				err = grid.verify(ctx, b, of, begin)
			}
			b.stop()
			if err != nil {
				return err
			}
		}
		return nil
	}
	if err := run(grid.Candidates); err != nil {
		return err
	}
	best := grid.choose()
	if best == nil {
		return errors.New("--full: no setting of the whole grid kept the goal")
	}
	r.Grid = &Grid{Settings: len(grid.Candidates), Seconds: time.Since(begin).Seconds(), Best: *best, Ratio: 1}
	if *best == *r.Choice {
		return nil
	}
	a, b := r.find(*r.Choice).afresh(), r.find(*best).afresh()
	if err := run([]*Candidate{a, b}); err != nil {
		return err
	}
	if a.Measured == nil || b.Measured == nil || r.score(&a.Measured.Figures) == 0 { // nothing was answered in the whole time
		return errors.New("--full: the choice and the best of the grid could not be measured once more")
	}
	r.Grid.Ratio = r.score(&b.Measured.Figures) / r.score(&a.Measured.Figures)
	return nil
}
