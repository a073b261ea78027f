// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"fmt"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/policy"
)

// At half of the capacity a machine that stands still now and then, and batches
// that are slow now and then, make hardly anybody refused but those who would have
// had their answer too late in any case: with batches as small, or as full, as
// they may be. A size that was seen once, in a slow batch, used to be avoided for
// ever by refusing whatever would have made such a batch.
func TestDisturbancesDoNotMakeAGoalRefuseWhatCouldBeAnswered(t *testing.T) {
	notShort(t)
	const requests, goal = 20_000, 60 * time.Millisecond
	slow := Disturbances{SlowOneIn: 50, SlowTimes: 10}
	both := Disturbances{StallEvery: 3 * time.Second, StallFor: 100 * time.Millisecond, SlowOneIn: 50, SlowTimes: 10}
	for name, d := range map[string]Disturbances{"slow batches": slow, "slow batches and stalls": both} {
		for _, workers := range []Workers{{Count: 1}, {Count: 4}, {Count: 3, Sharing: 0.5}} {
			for _, cost := range []string{"1=5.2ms,32=11.4ms", "1=1ms,32=20ms"} {
				t.Run(fmt.Sprintf("%s, %d workers sharing %g, %s", name, workers.Count, workers.Sharing, cost), func(t *testing.T) {
					t.Parallel()
					cfg := Config{
						Policy: policy.Settings{MaxBatchSize: 32}, Workers: workers, Cost: mustCost(t, cost),
						Hop: 7 * time.Microsecond, Requests: requests, Seed: 11, Disturbances: d,
					}
					cfg.Arrivals = Poisson{Rate: 0.5 * capacity(&cfg)}
					late := 0
					for _, wait := range []time.Duration{0, 20 * time.Millisecond} {
						cfg.Policy.WaitTime = wait
						late = max(late, laterThan(t, cfg, goal))
					}
					cfg.Policy.WaitTime, cfg.Policy.LatencyGoal = policy.Auto, goal
					r, err := Run(t.Context(), cfg)
					if err != nil {
						t.Fatal(err)
					}
					if r.Outcomes.Refused > late+requests/100 {
						t.Errorf("%d were refused, %d would have been late", r.Outcomes.Refused, late)
					}
				})
			}
		}
	}
}

// laterThan is how many requests are answered later than a limit.
func laterThan(t *testing.T, cfg Config, limit time.Duration) (n int) {
	r, err := Run(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	for _, x := range r.latencies {
		if x > int64(limit) {
			n++
		}
	}
	return n
}
