// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/broker/batcher"
	"github.com/ringbatch/ringbatch/policy"
)

// A GPU that has just begun takes 0.3 s for a batch that takes 1 ms later. Who
// believes that waits for long, so as not to send such a batch, and does not see
// that it has become quick: mean latencies were 7 to 60 times those of the best wait.
func TestAutoDoesNotBelieveWhatColdWorkersTook(t *testing.T) {
	notShort(t)
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
				Policy: policy.Settings{MaxBatchSize: 32}, Workers: c.workers, Cost: mustCost(t, c.cost), Hop: 7 * time.Microsecond, Seed: 1,
				Disturbances: Disturbances{Cold: 300 * time.Millisecond},
			}
			rate := c.load * capacity(&cfg)
			const coldUntil, until = 4 * time.Second, 12 * time.Second
			cfg.Arrivals, cfg.Requests = Poisson{Rate: rate}, int(rate*until.Seconds())
			if auto, best := meansWarm(t, cfg, coldUntil); auto > 1.1*best {
				t.Errorf("%.2f times the best fixed wait", auto/best)
			}
		})
	}
}

// meansWarm are the mean latencies of auto and of the best fixed wait, from two
// seconds after workers stopped to be cold for what they had not run yet.
func meansWarm(t *testing.T, cfg Config, coldUntil time.Duration) (auto, best float64) {
	t.Helper()
	mean := func(wait time.Duration) float64 {
		cfg.Policy.WaitTime = wait
		w, err := newWorld(cfg)
		if err != nil {
			t.Fatal(err)
		}
		sum, n := 0.0, 0
		w.answered = func(committed, answered batcher.Time) {
			if committed >= batcher.Time(coldUntil) {
				w.cfg.Disturbances.Cold = 0
			}
			if committed >= batcher.Time(coldUntil+2*time.Second) {
				sum += float64(answered - committed)
				n++
			}
		}
		if err := w.run(t.Context()); err != nil {
			t.Fatal(err)
		}
		return sum / float64(n)
	}
	best = mean(0)
	for _, wait := range gridWaits[1:] {
		best = min(best, mean(wait))
	}
	return mean(policy.Auto), best
}
