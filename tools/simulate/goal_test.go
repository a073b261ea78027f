// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/policy"
)

func goalConfig(t *testing.T, share float64, requests int) Config {
	cfg := Config{
		Policy:  policy.Settings{MaxBatchSize: 32, WaitTime: policy.Auto},
		Workers: Workers{Count: 2}, Cost: mustCost(t, "1=3.3ms,32=8.2ms"), Hop: 7 * time.Microsecond, Requests: requests, Seed: 5,
	}
	cfg.Arrivals = Poisson{Rate: share * capacity(&cfg)}
	return cfg
}

func busy(r *Result) (sum time.Duration) {
	for _, w := range r.Workers {
		sum += w.Busy
	}
	return sum
}

// Where a fixed wait keeps p99 within the goal, the goal does too, and leaves the
// workers as much time for others.
func TestALatencyGoalIsKeptWithAsLittleWorkAsTheBestFixedWait(t *testing.T) {
	notShort(t)
	for _, share := range []float64{0.05, 0.2, 0.5} {
		cfg := goalConfig(t, share, 40_000)
		const goal = 20 * time.Millisecond
		var best *Result
		for _, wait := range gridWaits {
			fixed := cfg
			fixed.Policy.WaitTime = wait
			r, err := Run(t.Context(), fixed)
			if err != nil {
				t.Fatal(err)
			}
			if r.Latency.P99 <= goal && (best == nil || busy(r) < busy(best)) {
				best = r
			}
		}
		if best == nil {
			t.Fatalf("at %v no fixed wait keeps the goal: the test is wrong", share)
		}
		cfg.Policy.LatencyGoal = goal
		r, err := Run(t.Context(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		if r.Latency.P99 > goal || float64(busy(r)) > 1.05*float64(busy(best)) {
			t.Errorf("at %v: p99 %v of a goal of %v, workers busy %.3f times as long as with the best fixed wait", share, r.Latency.P99, goal, float64(busy(r))/float64(busy(best)))
		}
	}
}

func TestUnderTwiceTheCapacityWhatIsAcceptedKeepsTheGoal(t *testing.T) {
	notShort(t)
	cfg := goalConfig(t, 2, 60_000)
	const goal = 25 * time.Millisecond
	cfg.Policy.LatencyGoal = goal
	r, err := Run(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	inTime := 0
	for _, x := range r.latencies {
		if x <= int64(goal) {
			inTime++
		}
	}
	done := float64(inTime) / r.Span.Seconds() / capacity(&cfg)
	if r.Latency.P99 > goal || done < 0.9 {
		t.Errorf("p99 %v of a goal of %v, %.3f of the capacity done in time, %d refused", r.Latency.P99, goal, done, r.Outcomes.Refused)
	}
}

// A client that has fallen out of step with the others is not refused for ever, each time that
// it tries again, while the others' batches follow one upon the other.
func TestClientsThatWaitForTheirAnswersFindAWaitThatKeepsATightGoal(t *testing.T) {
	notShort(t)
	cfg := Config{
		Policy:  policy.Settings{MaxBatchSize: 32, WaitTime: policy.Auto, LatencyGoal: 7200 * time.Microsecond},
		Workers: Workers{Count: 2}, Cost: mustCost(t, "1=5ms,32=5.5ms"), Hop: 7 * time.Microsecond, Requests: 20_000, Seed: 5,
		Arrivals:     ClosedLoop{Clients: 48, InFlight: 1},
		Disturbances: Disturbances{StallEvery: time.Second, StallFor: 30 * time.Millisecond},
	}
	r, err := Run(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	if r.Outcomes.Refused > cfg.Requests/100 {
		t.Errorf("%+v", r.Outcomes)
	}
}

func TestARequestThatCannotMakeItsDeadlineIsRefusedWhenItArrives(t *testing.T) {
	notShort(t)
	cfg := goalConfig(t, 2, 30_000)
	cfg.Policy.WaitTime, cfg.Policy.LatencyGoal = policy.Auto, 50*time.Millisecond
	cfg.Load.Deadline = 25 * time.Millisecond
	r, err := Run(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	if o := r.Outcomes; o.Refused == 0 || o.Late+o.Expired > o.Completed/100 {
		t.Errorf("%+v", o)
	}
}

// Without a goal, too: work that comes too late for its deadline is for nobody.
func TestUnderTwiceTheCapacityDeadlinesAreKeptByRefusingOnArrival(t *testing.T) {
	notShort(t)
	for _, wait := range []time.Duration{policy.Auto, 2 * time.Millisecond} {
		cfg := goalConfig(t, 2, 30_000)
		cfg.Policy.WaitTime = wait
		cfg.Load.Deadline = 30 * time.Millisecond
		r, err := Run(t.Context(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		if done := r.RequestsPerSecond / capacity(&cfg); done < 0.95 {
			t.Errorf("wait %v: %.3f of the capacity done in time: %+v", wait, done, r.Outcomes)
		}
		if missed := r.Outcomes.Late + r.Outcomes.Expired; missed > cfg.Requests/100 {
			t.Errorf("wait %v: %d were taken and then late: %+v", wait, missed, r.Outcomes)
		}
	}
}

// What could be answered in time is not refused: with time for two batches nobody is.
func TestWithinTheCapacityNobodyIsRefusedForADeadlineThatCanBeKept(t *testing.T) {
	notShort(t)
	for _, share := range []float64{0.1, 0.5, 0.8} {
		cfg := goalConfig(t, share, 20_000)
		cfg.Load.Deadline = 25 * time.Millisecond
		r, err := Run(t.Context(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		if r.Outcomes.Completed != 20_000 {
			t.Errorf("at %v: %+v", share, r.Outcomes)
		}
	}
}
