// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/bench"
	"github.com/ringbatch/ringbatch/broker/configfile"
	"github.com/ringbatch/ringbatch/internal/must"
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

// The worker's other settings stay in the configuration.
func TestTheConfigurationIsOneThatTheBrokerReads(t *testing.T) {
	sig, err := tensor.ParseSignature([]string{"tokens:i32[<=512]"}, []string{"y:f32[2]"})
	must.Do(t, err)
	asked, err := policy.Policy{"max_queue": "50", "buckets.tokens.0": "64,512", "wait_time": "3ms", "max_batch_size": "32",
		"priorities": "2", "slots": "8192"}.Resolve(sig.Inputs)
	must.Do(t, err)
	r := &Report{
		options:    &Options{Command: `python "a\b" x="1"`, GPUs: []int{0, 1}, Instances: []int{1, 3}},
		declared:   declaration{"bert \"large\"", sig, asked.Policy(sig.Inputs), 32},
		Choice:     &Setting{Instances: 3, MaxBatchSize: 16, MPS: true},
		Goal:       Goal{P99: 20 * time.Millisecond},
		Candidates: []*Candidate{{Setting: Setting{Instances: 3, MaxBatchSize: 16, MPS: true}, Measured: &Figures{}}},
	}
	cfg, err := configfile.Parse(r.TOML())
	if err != nil {
		t.Fatalf("%v\n%s", err, r.TOML())
	}
	m := cfg.Models[0]
	got, err := m.Policy.Resolve(m.Signature.Inputs)
	if err != nil || got.MaxBatchSize != 16 || got.WaitTime != policy.Auto || got.Level(1).MaxQueue != 50 || len(got.Buckets) == 0 ||
		got.Slots != 8192 {
		t.Errorf("%+v, %v", got, err)
	}
	if w := m.Workers[0]; !cfg.MPS || w.Instances != 3 || !slices.Equal(w.GPUs, []int{0, 1}) ||
		w.Command[2] != `exec env python "a\b" x="1"` || m.Name != `bert "large"` {
		t.Errorf("%+v", cfg)
	}
}

func measured(instances, size int, due, perSecond, mean, p99 float64) *Candidate {
	c := &Candidate{Setting: Setting{Instances: instances, MaxBatchSize: size}}
	w := bench.Figures{DuePerSecond: due, PerSecond: perSecond, MeanMS: mean, P99MS: p99}
	c.add(&bench.Result{Each: []bench.Figures{w, w}}, time.Second)
	return c
}

func TestTheChoiceKeepsTheGoalAndIsNoLargerThanItMustBe(t *testing.T) {
	settings := func(rate float64) []*Candidate {
		return []*Candidate{
			measured(1, 8, rate, 500, 9, 15), measured(2, 8, rate, 990, 9, 18), measured(3, 8, rate, 1000, 10, 19),
			measured(4, 32, rate, 2000,
				14, 30),
		}
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
		if r.choose(); (r.Choice == nil) != (c.want == nil) || r.Choice != nil && *r.Choice != *c.want {
			t.Errorf("%s: %v, want %v", name, r.Choice, c.want)
		}
	}
	failed := measured(5, 32, 0, 9000, 1, 1)
	failed.add(&bench.Result{Errors: map[string]int64{"WorkerDied": 1}}, time.Second)
	r := &Report{Candidates: append(settings(0), failed), options: &Options{}}
	if r.choose(); r.Choice == nil || *r.Choice == failed.Setting || !strings.Contains(r.Why, "2,000 requests/s") {
		t.Errorf("one whose workers die was chosen, or it does not say why: %v, %s", r.Choice, r.Why)
	}
}

func TestARateIsServedIfTheRequestsThatCameWereAnswered(t *testing.T) {
	for name, c := range map[string]struct {
		windows []bench.Figures
		want    bool
	}{
		"fewer came than the rate":    {[]bench.Figures{{DuePerSecond: 17, PerSecond: 17}, {DuePerSecond: 15, PerSecond: 15}}, true},
		"the last came at the end":    {[]bench.Figures{{DuePerSecond: 20, PerSecond: 19}, {DuePerSecond: 22, PerSecond: 21}}, true},
		"a window in which none came": {[]bench.Figures{{}, {DuePerSecond: 20, PerSecond: 20}}, true},
		"many were not answered":      {[]bench.Figures{{DuePerSecond: 30, PerSecond: 22}, {DuePerSecond: 25, PerSecond: 20}}, false},
		"none came at all":            {[]bench.Figures{{}, {}}, false},
	} {
		x := &Candidate{}
		x.add(&bench.Result{Each: c.windows}, time.Second)
		r := &Report{Goal: Goal{Rate: 20}}
		if got := r.keeps(x.Measured); got != c.want {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
}

func TestAWindowWithoutAnswersHasNoLatency(t *testing.T) {
	x := &Candidate{}
	x.add(&bench.Result{Each: []bench.Figures{{PerSecond: 10, MeanMS: 4, P99MS: 8}, {}, {PerSecond: 30, MeanMS: 8, P99MS: 8}}}, time.Second)
	if m := x.Measured; m.Windows != 3 || m.MeanMS != 7 || m.P99MS != 8 {
		t.Errorf("%+v", m)
	}
}
