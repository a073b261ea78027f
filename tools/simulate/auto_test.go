// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"math"
	"strings"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/broker/batcher"
	"github.com/ringbatch/ringbatch/policy"
)

// meanAfter is the mean latency of requests that were committed in a part of
// the run.
func meanAfter(t *testing.T, cfg Config, wait, from, to time.Duration) float64 {
	t.Helper()
	cfg.Policy.WaitTime = wait
	if err := cfg.validate(); err != nil {
		t.Fatal(err)
	}
	w, err := newWorld(cfg)
	if err != nil {
		t.Fatal(err)
	}
	sum, n := 0.0, 0
	w.answered = func(committed, answered batcher.Time) {
		if committed >= batcher.Time(from) && committed < batcher.Time(to) {
			sum += float64(answered - committed)
			n++
		}
	}
	if err := w.run(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n < 100 {
		t.Fatalf("only %d requests from %v to %v", n, from, to)
	}
	return sum / float64(n)
}

// A part of the grid that `ringbatch simulate --grid` runs in full. A change that makes
// auto much worse fails here; the figures are in docs/results/batching.md.
func TestAShortGridIsNearTheBestFixedWaits(t *testing.T) {
	notShort(t)
	cells, err := gridCells(1, 0.1)
	if err != nil {
		t.Fatal(err)
	}
	results, err := runGridCells(t.Context(), cells, func(int) {})
	if err != nil {
		t.Fatal(err)
	}
	g := newGridResult(1, results)
	for _, s := range g.Summary {
		if s.Kept < 0.6 || s.Kind == "steady" && (s.Mean > 1 || s.Worst > 1.2) {
			t.Errorf("%+v", s)
		}
	}
	var text strings.Builder
	if err := g.WriteText(&text); err != nil || strings.Count(text.String(), "\n") < 5 {
		t.Errorf("%v\n%s", err, &text)
	}
}

// A day in a minute: load and cost of it go up and down, with a busy noon.
func TestOverADayAutoBeatsEveryFixedWait(t *testing.T) {
	notShort(t)
	cfg := Config{
		Policy: policy.Settings{MaxBatchSize: 32}, Workers: Workers{Count: 3}, Cost: mustCost(t, "1=5ms,32=5.5ms"),
		Hop: 7 * time.Microsecond, Seed: 3,
	}
	const day = 40 * time.Second
	base := capacity(&cfg)
	total := 0.0
	for hour := range 24 {
		load := 0.02 + 0.8*math.Pow(math.Sin(math.Pi*float64(hour)/24), 4)
		cost := 1.0
		if hour < 8 { // at night the GPU is its own
			cost = 0.4
		}
		cfg.Phases = append(cfg.Phases, Phase{From: day / 24 * time.Duration(hour), Rate: load, Cost: cost})
		total += load * base * day.Seconds() / 24
	}
	cfg.Arrivals = Poisson{Rate: base}
	cfg.Requests = int(total)
	auto := meanAfter(t, cfg, policy.Auto, 0, day)
	for _, wait := range gridWaits {
		if fixed := meanAfter(t, cfg, wait, 0, day); auto >= fixed {
			t.Errorf("auto has %.3f times the mean latency of %v", auto/fixed, wait)
		}
	}
}

// notShort leaves a simulation out of the race detector's run, which has
// nothing to find in one goroutine and takes twenty times as long.
func notShort(t *testing.T) {
	t.Helper()
	if testing.Short() {
		t.Skip("a long simulation")
	}
}

// meansOf are the mean latencies in a part of the run, over several seeds: of auto,
// and of the best of some fixed waits.
func meansOf(t *testing.T, cfg Config, fixed []time.Duration, seeds int, from, to time.Duration) (auto, best float64) {
	t.Helper()
	sum := func(wait time.Duration) (sum float64) {
		for seed := range seeds {
			cfg.Seed = uint64(seed + 1)
			sum += meanAfter(t, cfg, wait, from, to)
		}
		return sum
	}
	best = math.Inf(1)
	for _, wait := range fixed {
		best = min(best, sum(wait))
	}
	return sum(policy.Auto), best
}

// What workers took side by side was seen of full batches only: that must not
// make small ones look slow side by side, which a long wait would never disprove.
//
// It is 1.04 over 128 seeds, and 1.02 to 1.05 over each 32 of them; over eight it goes up
// to 1.08. Without a wait that is, and with one of 250 µs it would be 1.2: the limit is
// far from both, so that other luck does not break it.
func TestAfterFullLoadAutoDoesNotWaitForLong(t *testing.T) {
	notShort(t)
	cfg := Config{
		Policy: policy.Settings{MaxBatchSize: 32}, Workers: Workers{Count: 2, Depth: 2}, Hop: 7 * time.Microsecond,
		Cost: mustCost(t, "1=1.15ms,4=1.6ms,32=8ms"), Busy: []Cost{mustCost(t, "1=1.3ms,4=1.9ms,32=15.4ms")}, // about ResNet-50 on an H200
	}
	const before, after, full = 2 * time.Second, 3 * time.Second, 3900.0
	cfg.Arrivals = Poisson{Rate: full}
	cfg.Phases = []Phase{{From: before, Rate: 0.05, Cost: 1}}
	cfg.Requests = int(full * (before.Seconds() + 0.05*after.Seconds()))
	if auto, best := meansOf(t, cfg, gridWaits[:2], 32, before+time.Second, before+after); auto > 1.1*best {
		t.Errorf("%.3f times the best fixed wait", auto/best)
	}
}

// On a machine that others use, too, all batches are slow for a while, and quick for
// a while. Sizes that were not seen meanwhile must not be taken for slow, or quick.
func TestAutoIsNearTheBestOnAMachineWhosePaceWanders(t *testing.T) {
	notShort(t)
	cfg := Config{
		Policy: policy.Settings{MaxBatchSize: 32}, Workers: Workers{Count: 3}, Cost: mustCost(t, "1=5ms,32=5.5ms"), Hop: 7 * time.Microsecond, Requests: 40_000,
		Disturbances: Disturbances{Wander: 0.2, WanderFor: 300 * time.Millisecond, SlowOneIn: 40, SlowTimes: 2},
	}
	cfg.Arrivals = Poisson{Rate: 0.17 * capacity(&cfg)}
	if auto, best := meansOf(t, cfg, gridWaits, 2, 0, time.Hour); auto > 1.05*best {
		t.Errorf("%.3f times the best fixed wait", auto/best)
	}
}
