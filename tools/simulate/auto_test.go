// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"math"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/policy"
)

// fixedWaits are the waits that auto is compared with.
var fixedWaits = []time.Duration{
	0, 250 * time.Microsecond, 500 * time.Microsecond, time.Millisecond, 2 * time.Millisecond,
	5 * time.Millisecond, 10 * time.Millisecond, 20 * time.Millisecond,
}

// isNearTheBest compares the mean latency of auto, in a part of the run and over some seeds, with that
// of the best of some fixed waits.
func isNearTheBest(
	t *testing.T, cfg Config, disturb func() disturbance, fixed []time.Duration, seeds int, from, to time.Duration, limit float64,
) {
	t.Helper()
	sum := func(wait time.Duration) (sum float64) {
		cfg.Policy.WaitTime = wait
		for seed := range seeds {
			cfg.Seed = uint64(seed + 1)
			if disturb != nil {
				cfg.disturb = disturb()
			}
			mean, err := MeanBetween(t.Context(), cfg, from, to)
			must.Do(t, err)
			sum += mean
		}
		return sum
	}
	best := math.Inf(1)
	for _, wait := range fixed {
		best = min(best, sum(wait))
	}
	if auto := sum(policy.Auto); auto > limit*best {
		t.Errorf("auto has %.3f times the mean latency of the best fixed wait", auto/best)
	}
}

// A day in 40 seconds: load and cost go up and down, with a busy noon.
func TestOverADayAutoBeatsEveryFixedWait(t *testing.T) {
	cfg := Config{
		Policy: policy.Settings{MaxBatchSize: 32}, Workers: Workers{Count: 3}, Cost: mustCost(t, "1=5ms,32=5.5ms"),
		Hop: 7 * time.Microsecond,
	}
	const day = 40 * time.Second
	for hour := range 24 {
		load := 0.02 + 0.8*math.Pow(math.Sin(math.Pi*float64(hour)/24), 4)
		cost := 1.0
		if hour < 8 { // at night no other program uses the GPU
			cost = 0.4
		}
		cfg.Phases = append(cfg.Phases, Phase{From: day / 24 * time.Duration(hour), Rate: load, Cost: cost})
	}
	cfg.Arrivals = Poisson{Rate: Capacity(&cfg)}
	isNearTheBest(t, cfg, nil, fixedWaits, 1, 0, day, 1)
}

func TestTextsOfManyLengthsWaitNearlyAsLongAsIsBest(t *testing.T) {
	cfg := Config{
		Policy: policy.Settings{MaxBatchSize: 128, MaxBatchCost: 8192}, Workers: Workers{Count: 2}, Hop: 7 * time.Microsecond,
		Load: Load{MinTokens: 8, MaxTokens: 500}, Cost: mustCost(t, "256=2ms,8192=4.2ms"), Arrivals: Poisson{Rate: 9000},
	}
	isNearTheBest(t, cfg, nil, fixedWaits, 4, time.Second, 3*time.Second, 1.05)
}

// Only full batches were seen side by side. That must not make small ones look slow side by
// side, which a long wait would never disprove.
//
// The ratio is 1.04 over 128 seeds, and 1.02 to 1.05 over each 32 of them. With a wait of 250 µs it
// would be 1.2.
func TestAfterFullLoadAutoDoesNotWaitForLong(t *testing.T) {
	cfg := Config{
		Policy: policy.Settings{MaxBatchSize: 32}, Workers: Workers{Count: 2, Depth: 2}, Hop: 7 * time.Microsecond,
		Cost:     mustCost(t, "1=1.15ms,4=1.6ms,32=8ms"), // about ResNet-50 on an H200
		Busy:     []Cost{mustCost(t, "1=1.3ms,4=1.9ms,32=15.4ms")},
		Arrivals: Poisson{Rate: 3900}, Phases: []Phase{{From: 2 * time.Second, Rate: 0.05, Cost: 1}},
	}
	isNearTheBest(t, cfg, nil, fixedWaits[:2], 32, 3*time.Second, 5*time.Second, 1.1)
}
