// SPDX-License-Identifier: Apache-2.0

package policy_test

import (
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

var update = flag.Bool("update", false, "rewrite the table of docs/configuration.md")

// inputs have variable dimensions, one of a tensor whose name has all that a
// name may have.
var inputs = []tensor.Spec{
	{Name: "t", DType: tensor.I32, Shape: []int{512}, Variable: []int{0}},
	{Name: "a.b=c", DType: tensor.F32, Shape: []int{3, 64}, Variable: []int{1}},
}

func TestTheDefaultsAreInForceWhereNothingIsSet(t *testing.T) {
	s, err := policy.Policy(nil).Resolve(inputs)
	want := policy.Settings{MaxBatchSize: 32, WaitTime: policy.Auto, Lease: 30 * time.Second, MaxAttempts: 3,
		Levels: make([]policy.Level, 1)}
	if err != nil || !reflect.DeepEqual(s, want) {
		t.Errorf("%+v, %v", s, err)
	}
	if s, err = policy.New(policy.WaitTime(0)).Resolve(nil); err != nil || s.WaitTime != 0 {
		t.Errorf("a wait of 0: %+v, %v", s, err)
	}
}

func TestAutomaticBucketsArePowersOfTwoAndNamedOnesWin(t *testing.T) {
	odd := []tensor.Spec{{Name: "t", DType: tensor.I32, Shape: []int{500, 7, 1 << 31}, Variable: []int{0, 1, 2}}}
	s, err := policy.New(policy.AutoBuckets(), policy.Buckets("t", 1, 3, 7)).Resolve(odd)
	if err != nil || len(s.Buckets) != 3 || fmt.Sprint(s.Buckets[:2]) != "[[16 32 64 128 256 500] [3 7]]" {
		t.Fatalf("%v, %v", s.Buckets, err)
	}
	if last := s.Buckets[2]; last[len(last)-1] != 1<<31 || last[len(last)-2] != 1<<30 {
		t.Errorf("%v", last)
	}
	if text := s.Policy(odd)["buckets.t.0"]; text != "16,32,64,128,256,500" {
		t.Errorf("peers are told %q", text)
	}
	if s, err := policy.New(policy.AutoBuckets()).Resolve(nil); err != nil || len(s.Buckets) != 0 {
		t.Errorf("a model without variable dimensions: %v, %v", s.Buckets, err)
	}
	if _, err := policy.New(policy.AutoBuckets(), policy.Ragged(true)).Resolve(odd); !errors.Is(err, status.ErrInvalid) {
		t.Errorf("ragged: %v", err)
	}
}

// randomSettings are any that Validate takes.
func randomSettings(rng *rand.Rand) policy.Settings {
	ascending := func(n, most int) (list []int) {
		for i := 0; i < n; i++ {
			if x := 1 + rng.IntN(most); len(list) == 0 || x > list[len(list)-1] {
				list = append(list, x)
			}
		}
		return list
	}
	buckets := func(n, most int) (list []uint32) {
		for _, x := range ascending(n, most-1) {
			list = append(list, uint32(x))
		}
		return append(list, uint32(most))
	}
	duration := func() time.Duration { // of all sizes
		return time.Duration(rng.Int64N(int64(policy.MaxDuration)) >> rng.IntN(48))
	}
	s := policy.Settings{
		MaxBatchSize: 1 + rng.IntN(1<<rng.IntN(20)), MaxBatchCost: rng.IntN(1 << rng.IntN(31)), WaitTime: duration(),
		Lease: policy.MinLease + duration()/2, Ageing: duration(), PreserveOrder: rng.IntN(2) == 0,
		Slots: 1 + rng.IntN(1<<20), MaxAttempts: 1 + rng.IntN(100), Levels: make([]policy.Level, 1+rng.IntN(policy.MaxLevels)),
	}
	s.PreferredBatchSizes = ascending(rng.IntN(4), s.MaxBatchSize)
	s.DefaultPriority = rng.IntN(len(s.Levels))
	for i := range s.Levels {
		s.Levels[i] = policy.Level{MaxQueue: rng.IntN(1000), DefaultTimeout: duration(), MaxTimeout: duration(),
			OnTimeout: policy.Action(rng.IntN(2))}
	}
	switch rng.IntN(3) {
	case 0:
		s.Ragged = true
	case 1:
		s.Buckets = [][]uint32{buckets(rng.IntN(4), 512), nil}
		if rng.IntN(2) == 0 {
			s.Buckets[1] = buckets(rng.IntN(4), 64)
		}
	}
	return s
}

func TestAnyPolicyIsWrittenAndReadBackAsItself(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	rng := rand.New(rand.NewPCG(seed, 1))
	for range 300 {
		want := randomSettings(rng)
		texts := want.Policy(inputs)
		p, err := policy.Parse(texts.String())
		if err != nil || !reflect.DeepEqual(p, texts) {
			t.Fatalf("seed %d: %q: %v", seed, texts.String(), err)
		}
		got, err := p.Resolve(inputs)
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Fatalf("seed %d: %+v became %+v, %v", seed, want, got, err)
		}
		if list, err := p.Differences(&want, inputs); err != nil || len(list) > 0 {
			t.Fatalf("seed %d: it differs from itself: %v, %v", seed, list, err)
		}
	}
}

func TestTypedSettingsAndTextsAreTheSame(t *testing.T) {
	typed := policy.New(policy.MaxBatchSize(32), policy.MaxBatchCost(8192), policy.Cost("t.0"), policy.WaitTime(1500*time.Microsecond),
		policy.LatencyGoal(0), policy.PreferredBatchSizes([]int{8, 16}), policy.Slots(64), policy.MaxWindow(8), policy.Private(true),
		policy.Lease(20*time.Second), policy.MaxAttempts(2), policy.PreserveOrder(true), policy.Ragged(false),
		policy.NoWorker(policy.RefuseWithoutWorker), policy.Priorities(2), policy.DefaultPriority(1), policy.Ageing(time.Nanosecond),
		policy.MaxQueue(100), policy.MaxQueue(7).At(1), policy.DefaultTimeout(time.Minute), policy.MaxTimeout(time.Hour),
		policy.OnTimeout(policy.Delay).At(0), policy.Buckets("t", 0, 64, 512))
	texts, err := policy.Parse(`max_batch_size=32 max_batch_cost=8192 cost=t.0 wait_time=0.0015 latency_goal=0 preferred_batch_sizes=8,16 slots=64
		max_window=8 private=true lease=20 max_attempts=2 preserve_order=true ragged=false no_worker=refuse priorities=2 default_priority=1
		ageing=1ns max_queue=100 max_queue.1=7 default_timeout=1m max_timeout=1h on_timeout.0=delay buckets.t.0=64,512`)
	must.Do(t, err)
	x, err1 := typed.Resolve(inputs)
	y, err2 := texts.Resolve(inputs)
	if err1 != nil || err2 != nil || !reflect.DeepEqual(x, y) || x.Levels[0].MaxQueue != 100 || x.Levels[1].MaxQueue != 7 {
		t.Errorf("%+v, %v\n%+v, %v", x, err1, y, err2)
	}
	for _, k := range policy.Keys() { // so that a new row is tried here too
		if !strings.Contains(" "+texts.String(), " "+k.Name) {
			t.Errorf("%s is not tried", k.Name)
		}
	}
}

func TestABadValueIsRefusedByTheNameOfItsKey(t *testing.T) {
	for text, want := range map[string]string{
		"wait_tme=1":                          `unknown key "wait_tme" (did you mean wait_time?); known are ageing, `,
		"preferred_sizes=1":                   "did you mean preferred_batch_sizes?",
		"zzzzzzzzzzzz=1":                      `unknown key "zzzzzzzzzzzz"; known are`,
		"max_batch_size=0":                    "max_batch_size=0: must be a number, 1..1048576",
		"max_batch_size=1048577":              "max_batch_size=1048577: must be a number",
		"max_batch_size=1.5":                  "must be a number",
		"max_batch_size=":                     "max_batch_size=: must be a number",
		"max_batch_size.1=4":                  "max_batch_size has no parts",
		"max_batch_cost=-1":                   "max_batch_cost=-1: must be a number, 0..2147483647",
		"wait_time=soon":                      `"soon" is not a duration: write 5ms, 1.5s, or seconds as a number`,
		"wait_time=-1":                        "out of range",
		"wait_time=-1ms":                      "is not a duration",
		"wait_time=nan":                       "out of range",
		"wait_time=48h":                       "wait_time=48h: must be at most 24h0m0s",
		"wait_time=[1]":                       "is not a duration",
		"lease=1ns":                           "must be at least 100ms",
		"lease=0":                             "lease=0: must be at least 100ms",
		"max_attempts=0":                      "max_attempts=0: must be a number, 1..100",
		"preserve_order=perhaps":              "must be true or false",
		"on_timeout=wait":                     "must be reject or delay",
		"max_queue=-1":                        "max_queue=-1: must be a number, 0..",
		"max_queue.1=-1":                      "max_queue.1=-1: must be a number",
		"max_queue.63=1":                      "no such priority level",
		"max_queue.01=1":                      "no such priority level",
		"max_queue.x=1":                       "no such priority level",
		"priorities=2 ageing.1=1":             "ageing has no parts",
		"priorities=2 max_queue.2=1":          "max_queue.2=1: no such priority level, the model has 0..1",
		"priorities=64":                       "must be a number, 1..63",
		"default_priority=1":                  "default_priority is 1, must be 0..0",
		"preferred_batch_sizes=8,x":           "like 8,16,32",
		"preferred_batch_sizes=8,4":           "must ascend",
		"preferred_batch_sizes=64":            "more than max_batch_size 32",
		"preferred_batch_sizes=" + many(1025): "at most 1024 numbers",
		"buckets=8":                           "say which: buckets.INPUT.DIMENSION",
		"buckets.t.1=8":                       "no such variable dimension of an input; there are 2: t.0, a.b=c.1",
		"buckets.t.0=8":                       "the last one must be the dimension's maximum, 512",
		"buckets.t.0=9,8,512":                 "must ascend",
		"buckets.t.0=8,1024":                  "maximum, 512",
		"ragged=true buckets.t.0=512":         "a ragged model has no buckets",
	} {
		p, err := policy.Parse(text)
		must.Do(t, err)
		if _, err = p.Resolve(inputs); !errors.Is(err, status.ErrInvalid) || !strings.Contains(err.Error(), want) {
			t.Errorf("%.60s: %v, want %s", text, err, want)
		}
	}
	for text, want := range map[string]string{"a": "not key=value", "=1": "not key=value", "a=1\na=2": "a is set twice"} {
		if _, err := policy.Parse(text); !errors.Is(err, status.ErrInvalid) || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v", text, err)
		}
	}
}

func many(n int) string { return "1" + strings.Repeat(",1", n-1) }

func TestWhatCannotChangeWhileTheModelRunsIsRefusedThen(t *testing.T) {
	for _, k := range policy.Keys() {
		err := policy.Policy{k.Name: "1"}.CheckLive()
		if k.Live != (err == nil) || err != nil && (!errors.Is(err, status.ErrInvalid) ||
			!strings.Contains(err.Error(), "these can: max_batch_size, max_batch_cost, wait_time")) {
			t.Errorf("%s: %v", k.Name, err)
		}
	}
	if err := (policy.Policy{"wait_tme": "1"}).CheckLive(); err == nil || !strings.Contains(err.Error(), "did you mean wait_time") {
		t.Error(err)
	}
	live, fixed := policy.Policy{"wait_time": "1", "max_queue.1": "1", "slots": "8", "buckets.t.0": "512"}.Live()
	if live.String() != "wait_time=1 max_queue.1=1" || fixed.String() != "slots=8 buckets.t.0=512" {
		t.Errorf("%v and %v", live, fixed)
	}
}

func TestOneSettingForAllLevelsReplacesThoseOfSingleOnes(t *testing.T) {
	base := policy.Policy{"max_queue.0": "1", "max_queue.1": "2", "wait_time": "5ms", "max_timeout.1": "1s"}
	got := policy.Policy{"max_queue": "9", "max_timeout.0": "2s"}.Over(base)
	if got.String() != "wait_time=5ms max_queue=9 max_timeout.0=2s max_timeout.1=1s" || len(base) != 4 {
		t.Errorf("%s; base is now %s", got, base)
	}
}

func TestDifferencesAreOfWhatWasAskedForOnly(t *testing.T) {
	have, err := policy.Policy{"max_queue.1": "5", "wait_time": "7ms"}.Resolve(inputs)
	must.Do(t, err)
	asked := policy.Policy{"wait_time": "0.007", "max_batch_size": "64", "max_queue": "5"}
	list, err := asked.Differences(&have, inputs)
	if fmt.Sprint(list) != "[{max_batch_size 32 64} {max_queue.0 0 5}]" || err != nil {
		t.Errorf("%v, %v", list, err)
	}
	if _, err := (policy.Policy{"wait_tme": "1"}).Differences(&have, inputs); !errors.Is(err, status.ErrInvalid) {
		t.Error(err)
	}
}

func TestKeysOfANewerBrokerArePassedOver(t *testing.T) {
	if p := (policy.Policy{"wait_time": "1s", "colour": "red", "colour.1": "blue"}).Known(); p.String() != "wait_time=1s" {
		t.Error(p)
	}
}

func TestSettingsMadeByHandAreChecked(t *testing.T) {
	level := func(l policy.Level) policy.Settings {
		return policy.Settings{MaxBatchSize: 1, Levels: []policy.Level{l}}
	}
	for want, s := range map[string]policy.Settings{
		"max_batch_size is 0":                         {},
		"64 priorities, at most 63":                   {MaxBatchSize: 1, Levels: make([]policy.Level, 64)},
		"max_queue.0 is -1":                           level(policy.Level{MaxQueue: -1}),
		"on_timeout.0 is 2":                           level(policy.Level{OnTimeout: 2}),
		"max_timeout.0 is -1ns":                       level(policy.Level{MaxTimeout: -1}),
		"default_timeout.0 is 48h0m0s":                level(policy.Level{DefaultTimeout: 48 * time.Hour}),
		"wait_time is -2ns":                           {MaxBatchSize: 1, WaitTime: -2},
		"ageing is 24h0m0.000000001s":                 {MaxBatchSize: 1, Ageing: policy.MaxDuration + 1},
		"default_priority is -1":                      {MaxBatchSize: 1, DefaultPriority: -1},
		"preferred_batch_sizes has 1025 entries":      {MaxBatchSize: 1, PreferredBatchSizes: make([]int, 1025)},
		"preferred_batch_sizes are [-1], must ascend": {MaxBatchSize: 1, PreferredBatchSizes: []int{-1}},
		"buckets for 9 dimensions":                    {MaxBatchSize: 1, Buckets: make([][]uint32, 9)},
		"buckets are [4 3], must ascend":              {MaxBatchSize: 1, Buckets: [][]uint32{nil, {4, 3}}},
		"4097 buckets of variable dimension 0":        {MaxBatchSize: 1, Buckets: [][]uint32{make([]uint32, 4097)}},
	} {
		if err := s.Validate(); !errors.Is(err, status.ErrInvalid) || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
}

// The table of docs/configuration.md is that of the code.
func TestDocumentationHasTheTable(t *testing.T) {
	const file, begin, end = "../docs/configuration.md", "-update -->\n", "<!-- end of keys -->"
	text, err := os.ReadFile(file)
	must.Do(t, err)
	before, rest, ok1 := strings.Cut(string(text), begin)
	was, after, ok2 := strings.Cut(rest, end)
	if !ok1 || !ok2 {
		t.Fatalf("%s has no place for the table", file)
	}
	var b strings.Builder
	b.WriteString("| key | value | default | while it runs | meaning |\n|---|---|---|---|---|\n")
	for _, k := range policy.Keys() {
		name, def, live := "`"+k.Name+"`", k.DefaultNote, "no"
		if k.Default != "" {
			def = "`" + k.Default + "`"
		}
		if k.Sub != "" {
			name = "`" + k.Name + "." + k.Sub + "`"
		}
		if k.Live {
			live = "yes"
		}
		if k.PerLevel {
			name += ", of each level"
		}
		fmt.Fprintf(&b, "| %s | %s | %s | %s | %s |\n", name, k.Kind, def, live, k.Help)
	}
	if b.String() == was {
		return
	}
	if !*update {
		t.Fatalf("the table of %s is old: go test ./policy -run Documentation -update", file)
	}
	must.Do(t, os.WriteFile(file, []byte(before+begin+b.String()+end+after), 0o644))
}

func FuzzPolicy(f *testing.F) {
	for _, k := range policy.Keys() {
		f.Add(k.Name + "=" + k.Default)
		f.Add(k.Name + ".0=5ms")
	}
	f.Add("buckets.t.0=1,512 max_queue.62=1\npreferred_batch_sizes=[1,2]")
	f.Fuzz(func(t *testing.T, text string) {
		p, err := policy.Parse(text)
		if err != nil {
			return
		}
		s, err := p.Resolve(inputs)
		if err != nil {
			if !errors.Is(err, status.ErrInvalid) {
				t.Fatalf("%q: unnamed error %v", text, err)
			}
			return
		}
		if s.Slots == 0 {
			s.Slots = 1 // the broker chooses
		}
		again, err := s.Policy(inputs).Resolve(inputs)
		if err != nil || !reflect.DeepEqual(again, s) {
			t.Fatalf("%q is %+v, and then %+v, %v", text, s, again, err)
		}
	})
}
