// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/broker/batcher"
	"github.com/ringbatch/ringbatch/policy"
)

func goalConfig(t *testing.T, share float64, requests int) Config {
	cfg := Config{
		Policy:  policy.Settings{MaxBatchSize: 32, WaitTime: policy.Auto},
		Workers: Workers{Count: 2}, Cost: mustCost(t, "1=3.3ms,32=8.2ms"), Hop: 7 * time.Microsecond, Requests: requests, Seed: 5,
	}
	cfg.Arrivals = Poisson{Rate: share * Capacity(&cfg)}
	return cfg
}

// A client that has fallen out of step with the others is not refused each time that it tries again,
// while the others' batches follow one upon the other.
func TestClientsThatWaitForTheirAnswersFindAWaitThatKeepsATightGoal(t *testing.T) {
	r := mustRun(t, Config{
		Policy:  policy.Settings{MaxBatchSize: 32, WaitTime: policy.Auto, LatencyGoal: 7200 * time.Microsecond},
		Workers: Workers{Count: 2}, Cost: mustCost(t, "1=5ms,32=5.5ms"), Hop: 7 * time.Microsecond, Requests: 20_000, Seed: 5,
		Arrivals: ClosedLoop{Clients: 48, InFlight: 1}, disturb: stalls(time.Second, 30*time.Millisecond),
	})
	if r.Outcomes.Refused > 200 {
		t.Errorf("%+v", r.Outcomes)
	}
}

func TestUnderTwiceTheCapacityDeadlinesAreKeptByRefusingOnArrival(t *testing.T) {
	for name, p := range map[string]policy.Settings{
		"auto": {WaitTime: policy.Auto}, "fixed": {WaitTime: 2 * time.Millisecond},
		"goal":   {WaitTime: policy.Auto, LatencyGoal: 50 * time.Millisecond},
		"levels": {WaitTime: policy.Auto, Levels: make([]policy.Level, 2)},
	} {
		cfg := goalConfig(t, 2, 30_000)
		p.MaxBatchSize = 32
		cfg.Policy, cfg.Load.Deadline = p, 30*time.Millisecond
		most := cfg.Requests / 100
		if len(p.Levels) > 0 { // later urgent requests overtake the others
			cfg.Load.LevelShares, most = []float64{0.2, 0.8}, cfg.Requests/40
		}
		r := mustRun(t, cfg)
		if done := r.RequestsPerSecond / Capacity(&cfg); done < 0.95 {
			t.Errorf("%s: %.3f of the capacity done in time: %+v", name, done, r.Outcomes)
		}
		if missed := r.Outcomes.Late + r.Outcomes.Expired; missed > most {
			t.Errorf("%s: %d were taken and then late: %+v", name, missed, r.Outcomes)
		}
	}
}

func TestWithinTheCapacityNoRequestIsRefusedForADeadlineThatCanBeKept(t *testing.T) {
	for _, share := range []float64{0.1, 0.5, 0.8} {
		cfg := goalConfig(t, share, 20_000)
		cfg.Load.Deadline = 25 * time.Millisecond
		if r := mustRun(t, cfg); r.Outcomes.Completed != cfg.Requests {
			t.Errorf("at %v: %+v", share, r.Outcomes)
		}
	}
	texts := Config{ // hardly two fit a batch, and some are above its maximum
		Policy: policy.Settings{MaxBatchSize: 128, MaxBatchCost: 300, WaitTime: policy.Auto}, Workers: Workers{Count: 2},
		Cost: mustCost(t, "256=1ms,512=2ms"), Arrivals: Poisson{Rate: 900}, Requests: 20_000, Hop: 7 * time.Microsecond,
		Load: Load{MinTokens: 8, MaxTokens: 500, Deadline: 40 * time.Millisecond},
	}
	if r := mustRun(t, texts); r.Outcomes.Completed != texts.Requests {
		t.Errorf("texts: %+v", r.Outcomes)
	}
}

// At twice the capacity nearly all work is in time, however little is known of a single shape, and
// however many rows a worker sees of a batch.
func TestDeadlinesAreKeptWithManyShapesAndWithPadding(t *testing.T) {
	shapes := Config{
		Policy: policy.Settings{MaxBatchSize: 1, WaitTime: policy.Auto}, Workers: Workers{Count: 1}, Cost: mustCost(t, "1=20ms"),
		Arrivals: Poisson{Rate: 100}, Load: Load{Deadline: 30 * time.Millisecond, Shapes: 64},
	}
	padded := Config{
		Policy:  policy.Settings{MaxBatchSize: 4, WaitTime: 2 * time.Millisecond},
		Workers: Workers{Count: 1, Pad: batcher.PadFixed, PadTo: 32}, Cost: mustCost(t, "1=5ms,32=20ms"),
		Arrivals: Poisson{Rate: 400}, Load: Load{Deadline: 50 * time.Millisecond},
	}
	for name, c := range map[string]struct {
		cfg      Config
		capacity float64 // requests per second
		want     float64 // share of it
	}{"64 shapes": {shapes, 50, 0.75}, "padded": {padded, 200, 0.95}} {
		c.cfg.Hop, c.cfg.Seed, c.cfg.Requests = 7*time.Microsecond, 1, 5000
		if got := mustRun(t, c.cfg).RequestsPerSecond / c.capacity; got < c.want {
			t.Errorf("%s: %.2f of the capacity is in time, want %.2f", name, got, c.want)
		}
	}
}
