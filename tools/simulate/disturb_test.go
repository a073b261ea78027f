// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"fmt"
	"math"
	"math/bits"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/broker/batcher"
	"github.com/ringbatch/ringbatch/policy"
)

type disturbance = func(w batcher.WorkerID, rows int, start, took batcher.Time) batcher.Time

// slowBatches makes one batch in oneIn take times as long.
func slowBatches(oneIn int, times float64) disturbance {
	rng := rand.New(rand.NewPCG(11, 14))
	return func(_ batcher.WorkerID, _ int, _, took batcher.Time) batcher.Time {
		if rng.IntN(oneIn) == 0 {
			took = batcher.Time(times * float64(took))
		}
		return took
	}
}

// stalls makes the workers stand still for a time, again and again.
func stalls(every, length time.Duration) disturbance {
	return func(_ batcher.WorkerID, _ int, start, took batcher.Time) batcher.Time {
		if start/batcher.Time(every) != (start+took)/batcher.Time(every) {
			took += batcher.Time(length)
		}
		return took
	}
}

// wander makes all batches slow for a while, and quick for a while: other programs use the machine.
func wander() disturbance {
	const step = 5 * time.Millisecond
	rng, paces := rand.New(rand.NewPCG(13, 14)), []float64{0}
	return func(_ batcher.WorkerID, _ int, start, took batcher.Time) batcher.Time {
		at, kept := int(start/batcher.Time(step)), math.Exp(-1.0/60)
		for len(paces) <= at {
			paces = append(paces, kept*paces[len(paces)-1]+0.2*math.Sqrt(1-kept*kept)*rng.NormFloat64())
		}
		return batcher.Time(math.Exp(paces[at]) * float64(took))
	}
}

// cold makes the first batch of 1, of 2, of up to 4, 8 … rows take 0.3 s longer in each worker.
func cold(until time.Duration) disturbance {
	type first struct {
		worker batcher.WorkerID
		octave int
	}
	warm := map[first]bool{}
	return func(w batcher.WorkerID, rows int, start, took batcher.Time) batcher.Time {
		x := first{w, bits.Len(uint(rows - 1))}
		if !warm[x] && start < batcher.Time(until) {
			took += batcher.Time(300 * time.Millisecond)
		}
		warm[x] = true
		return took
	}
}

// At half of the capacity, slow batches and stalls lead to hardly more refusals than there
// would be late requests without a wait, or with a long one.
func TestDisturbancesDoNotMakeAGoalRefuseWhatCouldBeAnswered(t *testing.T) {
	const requests, goal = 20_000, 60 * time.Millisecond
	both := func() disturbance {
		slow, still := slowBatches(50, 10), stalls(3*time.Second, 100*time.Millisecond)
		return func(w batcher.WorkerID, rows int, start, took batcher.Time) batcher.Time {
			return still(w, rows, start, slow(w, rows, start, took))
		}
	}
	for _, workers := range []Workers{{Count: 1}, {Count: 4}, {Count: 3, Sharing: 0.5}} {
		for _, cost := range []string{"1=5.2ms,32=11.4ms", "1=1ms,32=20ms"} {
			t.Run(fmt.Sprintf("%d workers sharing %g, %s", workers.Count, workers.Sharing, cost), func(t *testing.T) {
				t.Parallel()
				cfg := Config{
					Policy: policy.Settings{MaxBatchSize: 32}, Workers: workers, Cost: mustCost(t, cost),
					Hop: 7 * time.Microsecond, Requests: requests, Seed: 11,
				}
				cfg.Arrivals = Poisson{Rate: 0.5 * Capacity(&cfg)}
				late := 0
				for _, wait := range []time.Duration{0, 20 * time.Millisecond} {
					cfg.Policy.WaitTime, cfg.disturb = wait, both()
					late = max(late, requests-mustRun(t, cfg).Within(goal))
				}
				cfg.Policy.WaitTime, cfg.Policy.LatencyGoal, cfg.disturb = policy.Auto, goal, both()
				if r := mustRun(t, cfg); r.Outcomes.Refused > late+requests/100 {
					t.Errorf("%d were refused, %d would have been late", r.Outcomes.Refused, late)
				}
			})
		}
	}
}

// A GPU that has just begun takes 0.3 s for a batch that takes 1 ms later. An advisor that believes
// that waits long, and does not see that the batch has become quick.
func TestAutoDoesNotBelieveTheTimesOfColdWorkers(t *testing.T) {
	for name, c := range map[string]struct {
		cost    string
		workers Workers
		load    float64
	}{
		"one worker, 5 %":             {"1=1.15ms,4=1.6ms,32=8ms", Workers{Count: 1}, 0.05},
		"one worker, 20 %":            {"1=1ms,32=20ms", Workers{Count: 1}, 0.2},
		"two that share, 20 %":        {"1=2ms,8=2.1ms,9=4ms,16=4.1ms,17=8ms,32=8.2ms", Workers{Count: 2, Sharing: 0.8}, 0.2},
		"three workers, 5 %":          {"1=1ms,32=20ms", Workers{Count: 3}, 0.05},
		"three workers, 5 %, steps":   {"1=2ms,8=2.1ms,9=4ms,16=4.1ms,17=8ms,32=8.2ms", Workers{Count: 3}, 0.05},
		"six workers that share, 5 %": {"1=5ms,32=5.5ms", Workers{Count: 6, Sharing: 0.8}, 0.05},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cfg := Config{
				Policy: policy.Settings{MaxBatchSize: 32}, Workers: c.workers, Cost: mustCost(t, c.cost), Hop: 7 * time.Microsecond,
			}
			cfg.Arrivals = Poisson{Rate: c.load * Capacity(&cfg)}
			disturb := func() disturbance { return cold(4 * time.Second) }
			isNearTheBest(t, cfg, disturb, fixedWaits, 1, 6*time.Second, 12*time.Second, 1.1)
		})
	}
}

// Sizes that were not seen while the machine was slow must not be taken for quick, nor the reverse.
func TestAutoIsNearTheBestOnAMachineWhosePaceWanders(t *testing.T) {
	cfg := Config{
		Policy: policy.Settings{MaxBatchSize: 32}, Workers: Workers{Count: 3}, Cost: mustCost(t, "1=5ms,32=5.5ms"),
		Hop: 7 * time.Microsecond,
	}
	cfg.Arrivals = Poisson{Rate: 0.17 * Capacity(&cfg)}
	isNearTheBest(t, cfg, wander, fixedWaits, 2, 0, 12*time.Second, 1.05)
}
