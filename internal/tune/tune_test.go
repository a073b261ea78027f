// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"errors"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/bench"
	"github.com/ringbatch/ringbatch/broker/configfile"
	"github.com/ringbatch/ringbatch/internal/profile"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/tensor"
)

func TestACommandIsWordsOrAShells(t *testing.T) {
	for command, want := range map[string][]string{
		"python serve.py --n 2":        {"python", "serve.py", "--n", "2"},
		`python serve.py --name "a b"`: {"sh", "-c", `exec env python serve.py --name "a b"`},
		"OMP_NUM_THREADS=1 python x":   {"sh", "-c", "exec env OMP_NUM_THREADS=1 python x"},
		"cd models && exec python x":   {"sh", "-c", "cd models && exec python x"},
	} {
		if got := words(command); !slices.Equal(got, want) {
			t.Errorf("%s: %q, want %q", command, got, want)
		}
	}
}

// What the worker asks for besides what is tuned stays as it is.
func TestTheConfigurationIsOneThatTheBrokerReads(t *testing.T) {
	sig, err := tensor.ParseSignature([]string{"tokens:i32[<=512]"}, []string{"y:f32[2]"})
	if err != nil {
		t.Fatal(err)
	}
	asked, err := policy.Policy{"max_queue": "50", "buckets.tokens.0": "64,512", "wait_time": "3ms", "max_batch_size": "32", "priorities": "2", "slots": "8192"}.Resolve(sig.Inputs)
	if err != nil {
		t.Fatal(err)
	}
	r := &Report{
		options:    &Options{Command: `python "a\b" x="1"`, GPUs: []int{0, 1}, Instances: []int{1, 3}},
		declared:   declaration{"bert \"large\"", sig, asked.Policy(sig.Inputs), 32},
		Choice:     &Setting{Instances: 3, MaxBatchSize: 16, MPS: true},
		Goal:       Goal{P99: 20 * time.Millisecond},
		Candidates: []*Candidate{{Setting: Setting{Instances: 3, MaxBatchSize: 16, MPS: true}, Measured: &Measured{}}},
	}
	cfg, err := configfile.Parse(r.TOML())
	if err != nil {
		t.Fatalf("%v\n%s", err, r.TOML())
	}
	m := cfg.Models[0]
	got, err := m.Policy.Resolve(m.Signature.Inputs)
	if err != nil || got.MaxBatchSize != 16 || got.WaitTime != policy.Auto || got.Level(1).MaxQueue != 50 || len(got.Buckets) == 0 || got.Slots != 8192 {
		t.Errorf("%+v, %v", got, err)
	}
	if w := m.Workers[0]; !cfg.MPS || w.Instances != 3 || !slices.Equal(w.GPUs, []int{0, 1}) || w.Command[2] != `exec env python "a\b" x="1"` || m.Name != `bert "large"` {
		t.Errorf("%+v", cfg)
	}
}

func measured(instances, size int, perSecond, mean, p99 float64) *Candidate {
	c := &Candidate{Setting: Setting{Instances: instances, MaxBatchSize: size}, Predicted: &Figures{PerSecond: perSecond, MeanMS: mean, P99MS: p99}}
	c.add(&bench.Result{Each: []bench.Figures{{PerSecond: perSecond, MeanMS: mean, P99MS: p99}, {PerSecond: perSecond, MeanMS: mean, P99MS: p99}}}, time.Second)
	return c
}

func TestTheChoiceKeepsTheGoalAndIsNoLargerThanItMustBe(t *testing.T) {
	settings := func(rate float64) []*Candidate {
		list := []*Candidate{
			measured(1, 8, 500, 9, 15), measured(2, 8, 990, 9, 18), measured(3, 8, 1000, 10, 19), measured(4, 32, 2000, 14, 30),
		}
		for _, c := range list {
			c.Measured.least = rate
		}
		return list
	}
	for name, c := range map[string]struct {
		goal Goal
		want *Setting
	}{
		"most":                        {Goal{}, &Setting{Instances: 4, MaxBatchSize: 32}},
		"most within the goal":        {Goal{P99: 20 * time.Millisecond}, &Setting{Instances: 2, MaxBatchSize: 8}}, // 3 do hardly more
		"least latency":               {Goal{Rate: 600}, &Setting{Instances: 2, MaxBatchSize: 8}},
		"least latency, small rate":   {Goal{Rate: 400}, &Setting{Instances: 1, MaxBatchSize: 8}},
		"nothing":                     {Goal{P99: time.Millisecond}, nil},
		"a rate that is out of reach": {Goal{Rate: 5000}, nil},
	} {
		r := &Report{Goal: c.goal, Candidates: settings(c.goal.Rate), options: &Options{}}
		if got := r.choose(); (got == nil) != (c.want == nil) || got != nil && *got != *c.want {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
	failed := measured(5, 32, 9000, 1, 1)
	failed.add(&bench.Result{Each: failed.samples, Errors: map[string]int64{"WorkerDied": 1}}, time.Second)
	r := &Report{Candidates: append(settings(0), failed), options: &Options{}}
	if got := r.choose(); got == nil || *got == failed.Setting {
		t.Errorf("one whose workers die was chosen: %v", got)
	}
}

func TestARateIsServedIfThoseThatCameWereAnswered(t *testing.T) {
	for name, c := range map[string]struct {
		windows []bench.Figures
		want    bool
	}{
		"fewer came than the rate":    {[]bench.Figures{{DuePerSecond: 17, PerSecond: 17}, {DuePerSecond: 15, PerSecond: 15}}, true},
		"the last came at the end":    {[]bench.Figures{{DuePerSecond: 20, PerSecond: 19}, {DuePerSecond: 22, PerSecond: 21}}, true},
		"a window in which none came": {[]bench.Figures{{}, {DuePerSecond: 20, PerSecond: 20}}, true},
		"many were not answered":      {[]bench.Figures{{DuePerSecond: 30, PerSecond: 22}, {DuePerSecond: 25, PerSecond: 20}}, false},
		"nobody came":                 {[]bench.Figures{{}, {}}, false},
	} {
		x := &Candidate{}
		x.add(&bench.Result{Each: c.windows}, time.Second)
		r := &Report{Goal: Goal{Rate: 20}}
		if got := r.keeps(&x.Measured.Figures, 1); got != c.want {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
}

// crowded is a profile of a model whose batches of 8 rows take 80 ms, and fail with
// two instances at once.
func crowded() *profile.Profile {
	return &profile.Profile{
		Points: []profile.Point{{Rows: 1, Busy: 1, MS: 10, Batches: 9}, {Rows: 8, Busy: 1, MS: 80, Batches: 9}, {Rows: 1, Busy: 2, MS: 10, Batches: 9}},
		Failed: []*profile.BatchError{{Rows: 8, Busy: 2, Err: errors.New("no room\nat all")}},
	}
}

func TestSettingsWhoseBatchesFailAreLeftOutAndNoOthers(t *testing.T) {
	r := &Report{options: &Options{Instances: []int{1, 2, 3}, Sizes: []int{1, 8}}}
	list, err := r.predict(t.Context(), crowded(), false, 3)
	if err != nil {
		t.Fatal(err)
	}
	var got []Setting
	for _, c := range list {
		got = append(got, c.Setting)
	}
	if want := []Setting{{Instances: 1, MaxBatchSize: 1}, {Instances: 1, MaxBatchSize: 8}, {Instances: 2, MaxBatchSize: 1}, {Instances: 3, MaxBatchSize: 1}}; !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	if note := leftOut(crowded().Failed[0], false); note != "batches of 8 rows and more were left out with 2 instances at once and more: no room" {
		t.Error(note)
	}
	r = &Report{options: &Options{Instances: []int{2}, Sizes: []int{8}}, Notes: []string{"batches were left out"}}
	if list, err := r.predict(t.Context(), crowded(), false, 2); err != nil || len(list) != 0 || r.choose() != nil || !strings.Contains(r.verdict().Error(), "batches were left out") {
		t.Errorf("nothing is left: %v, %v, %v", list, err, r.verdict())
	}
}

func TestTheWarmupLastsUntilBatchesAreAnsweredAsTheyCome(t *testing.T) {
	r := &Report{options: &Options{Instances: []int{1}, Sizes: []int{1, 8}}, Goal: Goal{Rate: 50}}
	p := crowded()
	p.Points[1].MS = 400
	list, err := r.predict(t.Context(), p, false, 1)
	if err != nil || list[0].warmup() != leastWarmup || list[1].warmup() != 1200*time.Millisecond || list[1].afresh().warmup() != list[1].warmup() {
		t.Errorf("%v: %v, %v", err, list[0].warmup(), list[1].warmup())
	}
}

// Windows in which few requests come do not show that a rate is not served: what
// the profile says of the setting has to agree.
func TestHowManyMayBeAnsweredLateDependsOnTheProfile(t *testing.T) {
	for name, c := range map[string]struct {
		full    time.Duration // of batches of 8
		window  time.Duration
		windows []bench.Figures
		want    bool
	}{
		"88.6 of 100 a second":          {90300 * time.Microsecond, 100 * time.Millisecond, []bench.Figures{{DuePerSecond: 100, PerSecond: 89}, {DuePerSecond: 100, PerSecond: 89}}, false},
		"as slow, and all was answered": {90300 * time.Microsecond, 100 * time.Millisecond, []bench.Figures{{DuePerSecond: 100, PerSecond: 100}, {DuePerSecond: 100, PerSecond: 100}}, true},
		"quick enough":                  {40 * time.Millisecond, 100 * time.Millisecond, []bench.Figures{{DuePerSecond: 100, PerSecond: 90}, {DuePerSecond: 100, PerSecond: 90}}, true},
		"a batch runs beyond the end":   {400 * time.Millisecond, time.Second, []bench.Figures{{DuePerSecond: 10, PerSecond: 10}, {DuePerSecond: 10, PerSecond: 6}}, true},
		"quick enough, but idle":        {400 * time.Millisecond, time.Second, []bench.Figures{{DuePerSecond: 10, PerSecond: 4}, {DuePerSecond: 10, PerSecond: 6}}, false},
	} {
		x := &Candidate{Setting: Setting{Instances: 1, MaxBatchSize: 8}, full: c.full}
		x.add(&bench.Result{Each: c.windows}, c.window)
		r := &Report{Goal: Goal{Rate: c.windows[0].DuePerSecond}}
		if got := r.keeps(&x.Measured.Figures, 1); got != c.want {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
}

func TestAWindowWithoutAnswersHasNoLatency(t *testing.T) {
	x := &Candidate{}
	x.add(&bench.Result{Each: []bench.Figures{{PerSecond: 2, MeanMS: 6, P99MS: 8}, {}}}, time.Second)
	if m := x.Measured; m.PerSecond != 1 || m.MeanMS != 6 || m.P99MS != 8 {
		t.Errorf("%+v", m)
	}
}

func TestFinalistsAreTheBestOfEachNumberOfInstancesFirst(t *testing.T) {
	var list []*Candidate
	for n := 1; n <= 4; n++ {
		for _, size := range []int{1, 2, 4, 8, 16, 32} {
			c := measured(n, size, float64(100*n+size), 1, 1)
			c.Measured = nil
			list = append(list, c)
		}
	}
	r := &Report{options: &Options{}}
	got := r.finalists(list, margin)
	want := []Setting{{Instances: 4, MaxBatchSize: 32}, {Instances: 4, MaxBatchSize: 16}, {Instances: 4, MaxBatchSize: 8}} // 3 × 32 is predicted to be far behind
	for i, c := range got {
		if len(got) != len(want) || c.Setting != want[i] {
			t.Fatalf("%v, want %v", got, want)
		}
	}
}

// A real tail is longer than a simulated one: what was measured says by how much.
func TestIfNoneKeepsItsP99LighterLoadsAndOtherSettingsHaveAChance(t *testing.T) {
	r := &Report{Goal: Goal{P99: 20 * time.Millisecond}, options: &Options{}}
	load := func(inFlight int, perSecond, p99 float64) way {
		return way{inFlight, &Figures{PerSecond: perSecond, P99MS: p99}}
	}
	large := &Candidate{Setting: Setting{Instances: 2, MaxBatchSize: 32}, ways: []way{load(32, 2000, 8), load(64, 3000, 16), load(128, 4000, 30)}}
	small := &Candidate{Setting: Setting{Instances: 1, MaxBatchSize: 4}, ways: []way{load(4, 500, 6)}}
	list := []*Candidate{large, small}
	for _, c := range list {
		c.take(r, margin)
	}
	if first := r.finalists(list, margin); len(first) == 0 || first[0] != large || large.InFlight != 64 {
		t.Fatalf("%v, %d in flight", first, large.InFlight)
	}
	large.add(&bench.Result{Each: []bench.Figures{{PerSecond: 2800, MeanMS: 20, P99MS: 32}}}, time.Second)
	share := r.shareKept([]*Candidate{large}, margin) // it took twice as long
	for _, c := range list {
		c.take(r, share)
	}
	if next := r.finalists(list, share); share > 0.45 || len(next) == 0 || next[0] != large || large.InFlight != 32 || large.Measured != nil {
		t.Errorf("share %v, %v, %d in flight", share, next, large.InFlight)
	}
	large.add(&bench.Result{Each: []bench.Figures{{PerSecond: 1800, MeanMS: 15, P99MS: 24}}}, time.Second)
	share = r.shareKept([]*Candidate{large}, share)
	for _, c := range list {
		c.take(r, share)
	}
	if last := r.finalists(list, share); len(last) != 1 || last[0] != small {
		t.Errorf("share %v: %v", share, last)
	}
}

func TestWhatDoesNotComeUpIsNotTriedWithALighterLoad(t *testing.T) {
	r := &Report{Goal: Goal{P99: 20 * time.Millisecond}, options: &Options{}}
	candidate := func() *Candidate {
		c := &Candidate{Setting: Setting{Instances: 2, MaxBatchSize: 32}, ways: []way{{32, &Figures{PerSecond: 2000, P99MS: 8}}, {64, &Figures{PerSecond: 3000, P99MS: 16}}}}
		c.take(r, margin)
		return c
	}
	absent, slow := candidate(), candidate()
	absent.Note, absent.absent = "does not come up: no room", true
	slow.add(&bench.Result{Each: []bench.Figures{{PerSecond: 2800, MeanMS: 20, P99MS: 32}}, Errors: map[string]int64{"WorkerDied": 1}}, time.Second)
	if note := r.didNotKeep(slow); note != "2 × 32 (with 64 requests in flight) did not keep the goal: 2,800 requests/s, p99 32 ms; errors: WorkerDied" {
		t.Error(note)
	}
	list := []*Candidate{absent, slow}
	for _, c := range list {
		c.take(r, 0.5)
	}
	if next := r.finalists(list, 0.5); absent.Note == "" || slow.InFlight != 32 || len(next) != 1 || next[0] != slow {
		t.Errorf("%q; %d in flight; %v", absent.Note, slow.InFlight, next)
	}
}

// Where the machine does less than is simulated, what was ruled out may be as good.
func TestIfLessIsMeasuredThanSimulatedOthersAreMeasuredToo(t *testing.T) {
	r := &Report{options: &Options{}}
	for n := 1; n <= 4; n++ {
		for _, size := range []int{1, 2, 4, 8, 16, 32} {
			r.Candidates = append(r.Candidates, &Candidate{Setting: Setting{Instances: n, MaxBatchSize: size}, Predicted: &Figures{PerSecond: float64(30 * n * size), MeanMS: 1, P99MS: 1}})
		}
	}
	at := func(n, size int) *Candidate { return r.find(Setting{Instances: n, MaxBatchSize: size}) }
	list := []*Candidate{at(4, 32)}
	if got := r.underrated(list); got != nil {
		t.Errorf("nothing was measured yet: %v", got)
	}
	do := func(c *Candidate, perSecond float64) {
		c.add(&bench.Result{Each: []bench.Figures{{PerSecond: perSecond, MeanMS: 1, P99MS: 1}}}, time.Second)
	}
	do(at(4, 32), 3800)
	if got := r.underrated(list); got != nil {
		t.Errorf("it does as much as was simulated: %v", got)
	}
	do(at(4, 32), 0)                // 1,900 on average
	for _, n := range []int{3, 2} { // 2 are simulated at 1,920
		got := r.underrated(list)
		if len(got) != 1 || got[0] != at(n, 32) {
			t.Fatalf("%v, want %d × 32", got, n)
		}
		do(got[0], 1800)
		list = append(list, got[0])
	}
	if got := r.underrated(list); got != nil {
		t.Errorf("three of 24 are enough: %v", got)
	}
}

func TestTheRecommendationSaysWhy(t *testing.T) {
	unmeasured := measured(1, 2, 300, 9, 9)
	unmeasured.Measured = nil
	failed := measured(4, 8, 9000, 1, 1)
	failed.Note = "errors: WorkerDied"
	busy := measured(2, 8, 990, 9, 18)
	busy.InFlight = 32
	for want, c := range map[string]struct {
		goal Goal
		list []*Candidate
	}{
		"990 requests/s; nothing else was worth measuring: simulated, the next best, 1 × 2, does 30 % of what this one does (with 32 requests in flight)": {Goal{}, []*Candidate{busy, unmeasured}},
		"990 requests/s is the only one of 2 measured that keeps the goal (with 32 requests in flight)":                                                   {Goal{}, []*Candidate{busy, failed}},
		"9 ms on average; the other one measured, 1 × 8, is at 15 ms on average":                                                                          {Goal{Rate: 300}, []*Candidate{measured(2, 8, 300, 9, 15), measured(1, 8, 300, 15, 15)}},
		"990 requests/s; the best of the other 2 measured, 3 × 16, is at 1,000 requests/s, which counts as equally good, and has more instances and larger batches (with 32 requests in flight)": {
			Goal{}, []*Candidate{busy, measured(3, 16, 1000, 9, 15), measured(1, 8, 500, 9, 15)}},
	} {
		r := &Report{Goal: c.goal, Candidates: c.list, options: &Options{}}
		if r.Choice = r.choose(); r.Choice == nil || r.why() != want {
			t.Errorf("%v: %s\nwant %s", r.Choice, r.why(), want)
		}
	}
}

// Instances that take minutes to load are not started once more for nothing.
func TestTheModelThatTheWorkerMadeIsMeasuredIfItHasRoom(t *testing.T) {
	for _, c := range []struct {
		slots string
		sizes []int
		want  bool
	}{
		{"4096", nil, true},          // as the broker has it by default
		{"1783", []int{1, 32}, true}, // of large rows
		{"64", nil, false},
		{"4096", []int{64}, false}, // the worker's max_batch_size is 32
	} {
		r := &Report{options: &Options{Instances: []int{1, 4}, Sizes: c.sizes}, declared: declaration{maxBatchSize: 32, policy: policy.Policy{"slots": c.slots}}}
		if got := r.asDeclared(); got != c.want {
			t.Errorf("%+v: %v", c, got)
		}
	}
}

func TestTheIntervalOfAMeanIsStudents(t *testing.T) {
	mean, low, high := meanInterval([]float64{9, 10, 11})
	if mean != 10 || math.Abs(high-12.484) > 0.01 || math.Abs(low-7.516) > 0.01 {
		t.Errorf("%v %v %v", mean, low, high)
	}
}
