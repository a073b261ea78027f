// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"context"
	"math"
	"math/rand/v2"
	"reflect"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/status"
)

func mustRun(t testing.TB, cfg Config) *Result {
	t.Helper()
	r, err := Run(t.Context(), cfg)
	must.Do(t, err)
	return r
}

func mustCost(t testing.TB, text string) Cost {
	t.Helper()
	c, err := ParseCost(text)
	must.Do(t, err)
	return c
}

func near(got, want, tolerance float64) bool { return math.Abs(got-want) <= tolerance*math.Abs(want) }

// With batches of one request and a constant service time the simulation is an
// M/D/1 queue, whose mean wait is known: ρ·D / 2(1-ρ).
func TestWithoutBatchingItIsTheQueueOfTheTextbook(t *testing.T) {
	const requests, tolerance = 200_000, 0.02
	for _, load := range []float64{0.3, 0.6, 0.8} {
		r := mustRun(t, Config{
			Policy:   policy.Settings{MaxBatchSize: 1},
			Arrivals: Poisson{Rate: load * 1000},
			Workers:  Workers{Count: 1},
			Cost:     mustCost(t, "1=1ms"),
			Requests: requests,
			Seed:     7,
		})
		want := 1 + load/(2*(1-load)) // ms, service included
		if got := milliseconds(r.Latency.Avg); !near(got, want, tolerance) {
			t.Errorf("load %v: %.3f ms on average, want %.3f", load, got, want)
		}
		if got := r.Workers[0].Utilisation; !near(got, load, tolerance) {
			t.Errorf("load %v: utilisation %.3f", load, got)
		}
	}
}

func TestClientsThatWaitForAnswersFillEveryBatchOfABusyModel(t *testing.T) {
	r := mustRun(t, Config{
		Policy:   policy.Settings{MaxBatchSize: 32, WaitTime: 2 * time.Millisecond},
		Arrivals: ClosedLoop{Clients: 128},
		Workers:  Workers{Count: 3},
		Cost:     mustCost(t, "1=3.3ms,32=8.2ms"),
		Requests: 100_000,
	})
	if want := 3 * 32 / 0.0082; !near(r.RequestsPerSecond, want, 0.01) {
		t.Errorf("%.0f requests/s, want %.0f", r.RequestsPerSecond, want)
	}
	if r.MeanBatchRows < 31.9 {
		t.Errorf("%.1f rows per batch", r.MeanBatchRows)
	}
}

// Texts of 8 to 500 tokens fill batches of 8,192, some 32 rows, and the limit of rows does not count.
func TestBatchesOfTextsAreFullAtTheirMaximumOfTokens(t *testing.T) {
	cost := mustCost(t, "256=1ms,8192=4ms")
	for _, wait := range []time.Duration{0, policy.Auto} {
		r := mustRun(t, Config{
			Policy:   policy.Settings{MaxBatchSize: 128, MaxBatchCost: 8192, WaitTime: wait},
			Arrivals: ClosedLoop{Clients: 128},
			Load:     Load{MinTokens: 8, MaxTokens: 500},
			Workers:  Workers{Count: 2},
			Cost:     cost,
			Requests: 50_000,
		})
		// A batch stops at the first text that does not fit: half of one is left over, or less.
		if r.MeanBatchTokens < 8192-300 || r.MeanBatchTokens > 8192 || !near(r.MeanBatchRows, r.MeanBatchTokens/254, 0.02) {
			t.Errorf("wait %v: batches of %.0f tokens, %.1f rows", wait, r.MeanBatchTokens, r.MeanBatchRows)
		}
		if want := 2 * r.MeanBatchRows / cost.Of(int(r.MeanBatchTokens)).Seconds(); !near(r.RequestsPerSecond, want, 0.02) {
			t.Errorf("wait %v: %.0f requests/s, want %.0f", wait, r.RequestsPerSecond, want)
		}
	}
}

func TestALonelyClientNeverWaitsForOtherRequests(t *testing.T) {
	r := mustRun(t, Config{
		Policy:   policy.Settings{MaxBatchSize: 32, WaitTime: time.Second},
		Arrivals: ClosedLoop{Clients: 1, Think: time.Millisecond},
		Workers:  Workers{Count: 1},
		Cost:     mustCost(t, "1=3ms"),
		Hop:      10 * time.Microsecond,
		Requests: 1000,
	})
	if want := 3*time.Millisecond + 30*time.Microsecond; r.Latency.Max != want || r.Latency.P50 != want {
		t.Errorf("latency %+v, want %v always", r.Latency, want)
	}
	if r.Reasons.Nobody != 1000 {
		t.Errorf("reasons %+v", r.Reasons)
	}
}

func TestTheSameSeedGivesTheSameResult(t *testing.T) {
	cfg := Config{
		Policy:   policy.Settings{MaxBatchSize: 16, WaitTime: time.Millisecond, PreferredBatchSizes: []int{4, 8}},
		Arrivals: Bursty{Rate: 9000, On: 20 * time.Millisecond, Off: 20 * time.Millisecond},
		Load:     Load{MinRows: 1, MaxRows: 4, Shapes: 3, Deadline: 40 * time.Millisecond},
		Workers:  Workers{Count: 2, Depth: 2, Sharing: 0.3},
		Cost:     mustCost(t, "1=3ms,16=6ms"),
		Hop:      5 * time.Microsecond,
		Requests: 20_000,
		Seed:     42,
	}
	a, b := mustRun(t, cfg), mustRun(t, cfg)
	if !reflect.DeepEqual(a, b) {
		t.Error("two runs differ")
	}
	cfg.Seed++
	if c := mustRun(t, cfg); c.Latency == a.Latency {
		t.Error("the seed has no effect")
	}
}

func TestEveryRequestEndsOnceUnderAnyPolicy(t *testing.T) {
	for seed := range uint64(100) {
		cfg := randomSimulation(t, seed)
		r := mustRun(t, cfg)
		o := r.Outcomes
		if got := o.Completed + o.Late + o.Expired + o.TimedOut + o.Refused; got != cfg.Requests {
			t.Fatalf("seed %d: %d of %d requests ended: %+v", seed, got, cfg.Requests, o)
		}
		if cfg.Load.Deadline > 0 && r.Latency.Max > cfg.Load.Deadline {
			t.Fatalf("seed %d: latency %v over the deadline %v", seed, r.Latency.Max, cfg.Load.Deadline)
		}
		for _, w := range r.Workers {
			if w.Utilisation > 1.0001 {
				t.Fatalf("seed %d: utilisation %v", seed, w.Utilisation)
			}
		}
	}
}

func randomSimulation(t *testing.T, seed uint64) Config {
	rng := rand.New(rand.NewPCG(seed, 1))
	cfg := Config{
		Policy: policy.Settings{
			MaxBatchSize: 1 + rng.IntN(32), WaitTime: time.Duration(rng.IntN(5)) * time.Millisecond,
			PreserveOrder: rng.IntN(4) == 0, Ageing: time.Duration(rng.IntN(3)) * 10 * time.Millisecond,
		},
		Workers:  Workers{Count: 1 + rng.IntN(4), Depth: rng.IntN(4), Sharing: rng.Float64()},
		Cost:     mustCost(t, "1=3ms,32=8ms"),
		Hop:      time.Duration(rng.IntN(20)) * time.Microsecond,
		Requests: 500 + rng.IntN(1000),
		Seed:     seed,
	}
	cfg.Load = Load{MinRows: 1, MaxRows: 1 + rng.IntN(cfg.Policy.MaxBatchSize), Shapes: 1 + rng.IntN(4)}
	if rng.IntN(2) == 0 {
		cfg.Load.Deadline = time.Duration(5+rng.IntN(50)) * time.Millisecond
	}
	if rng.IntN(2) == 0 {
		cfg.Policy.Levels = []policy.Level{{MaxQueue: 20}, {DefaultTimeout: 20 * time.Millisecond, OnTimeout: policy.Action(rng.IntN(2))}}
		cfg.Load.LevelShares = []float64{rng.Float64(), 1}
	}
	switch rng.IntN(3) {
	case 0:
		cfg.Arrivals = Poisson{Rate: 100 + 5000*rng.Float64()}
	case 1:
		cfg.Arrivals = Bursty{Rate: 20000 * rng.Float64(), On: 10 * time.Millisecond, Off: 30 * time.Millisecond}
	default:
		think := time.Duration(rng.IntN(3)) * time.Millisecond
		cfg.Arrivals = ClosedLoop{Clients: 1 + rng.IntN(100), InFlight: 1 + rng.IntN(4), Think: think}
	}
	return cfg
}

func TestASimulationStopsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := Run(ctx, Config{
		Policy: policy.Settings{MaxBatchSize: 1}, Arrivals: Poisson{Rate: 1}, Workers: Workers{Count: 1},
		Cost: mustCost(t, "1=1ms"), Requests: 10,
	})
	must.Fail(t, "run", err, context.Canceled)
}

func TestABadSimulationIsRefused(t *testing.T) {
	good := func() Config {
		return Config{
			Policy: policy.Settings{MaxBatchSize: 4}, Arrivals: Poisson{Rate: 1}, Workers: Workers{Count: 1},
			Cost: mustCost(t, "1=1ms"), Requests: 10,
		}
	}
	for name, spoil := range map[string]func(*Config){
		"policy":         func(c *Config) { c.Policy.MaxBatchSize = 0 },
		"requests":       func(c *Config) { c.Requests = 0 },
		"hop":            func(c *Config) { c.Hop = -1 },
		"workers":        func(c *Config) { c.Workers.Count = 0 },
		"in flight":      func(c *Config) { c.Workers.Depth = -1 },
		"sharing":        func(c *Config) { c.Workers.Sharing = -1 },
		"cost":           func(c *Config) { c.Cost = nil },
		"rows":           func(c *Config) { c.Load.MinRows, c.Load.MaxRows = 3, 2 },
		"too many rows":  func(c *Config) { c.Load.MaxRows = 5 },
		"deadline":       func(c *Config) { c.Load.Deadline = -1 },
		"shapes":         func(c *Config) { c.Load.Shapes = -1 },
		"shares":         func(c *Config) { c.Load.LevelShares = []float64{1, 2} },
		"negative share": func(c *Config) { c.Load.LevelShares = []float64{-1} },
		"no share":       func(c *Config) { c.Load.LevelShares = []float64{0} },
		"no arrivals":    func(c *Config) { c.Arrivals = nil },
		"rate":           func(c *Config) { c.Arrivals = Poisson{} },
		"clients":        func(c *Config) { c.Arrivals = Poisson{Rate: 1, Clients: -1} },
		"on":             func(c *Config) { c.Arrivals = Bursty{Rate: 1} },
		"no clients":     func(c *Config) { c.Arrivals = ClosedLoop{} },
		"think":          func(c *Config) { c.Arrivals = ClosedLoop{Clients: 1, Think: -1} },
		"loop in flight": func(c *Config) { c.Arrivals = ClosedLoop{Clients: 1, InFlight: -1} },
	} {
		cfg := good()
		spoil(&cfg)
		_, err := Run(t.Context(), cfg)
		must.Fail(t, name, err, status.ErrInvalid)
	}
}

func BenchmarkSimulatedRequest(b *testing.B) {
	b.ReportAllocs()
	mustRun(b, Config{
		Policy:   policy.Settings{MaxBatchSize: 32, WaitTime: 2 * time.Millisecond},
		Arrivals: Poisson{Rate: 3500}, Workers: Workers{Count: 1}, Cost: mustCost(b, "1=3.3ms,32=8.2ms"), Requests: b.N,
	})
}

func TestTheMostTimeOfALevelIsADeadlineWhileItRunsToo(t *testing.T) {
	r := mustRun(t, Config{
		Policy:   policy.Settings{MaxBatchSize: 1, Levels: []policy.Level{{MaxTimeout: 5 * time.Millisecond}}},
		Arrivals: Poisson{Rate: 1}, Workers: Workers{Count: 1},
		Cost: mustCost(t, "1=10ms"), Requests: 1,
	})
	if r.Outcomes != (Outcomes{Late: 1}) {
		t.Errorf("%+v", r.Outcomes)
	}
}
