// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/status"
)

func stageOf(t *testing.T, workers int, cost time.Duration) Stage {
	t.Helper()
	p, err := policy.New(policy.MaxBatchSize(4), policy.WaitTime(0)).Resolve(nil)
	must.Do(t, err)
	return Stage{Policy: p, Workers: Workers{Count: workers}, Cost: Cost{{Rows: 1, Time: cost}}}
}

func TestARequestTakesTheTimeOfAllStagesAndTheSlowestOneLimitsTheThroughput(t *testing.T) {
	first := stageOf(t, 1, 2*time.Millisecond)
	cfg := Config{
		Policy: first.Policy, Workers: first.Workers, Cost: first.Cost,
		Stages:   []Stage{stageOf(t, 1, 5*time.Millisecond), stageOf(t, 1, time.Millisecond)},
		Arrivals: ClosedLoop{Clients: 1, InFlight: 1}, Requests: 100, Hop: 10 * time.Microsecond,
	}
	r := mustRun(t, cfg)
	// Client to broker, then broker to worker and back for each stage.
	if want := 8*time.Millisecond + 7*cfg.Hop; r.Latency.P50 != want || r.Latency.Max != want || r.Outcomes.Completed != 100 {
		t.Errorf("%v … %v, not %v; %+v", r.Latency.P50, r.Latency.Max, want, r.Outcomes)
	}
	if len(r.Stages) != 2 || r.Stages[0][0].Batches != 100 || r.Stages[1][0].Batches != 100 {
		t.Errorf("%+v", r.Stages)
	}
	cfg.Arrivals, cfg.Requests = ClosedLoop{Clients: 64, InFlight: 1}, 4000
	r = mustRun(t, cfg)
	if u := r.Stages[0][0].Utilisation; u < 0.95 || r.Outcomes.Completed != 4000 || r.Workers[0].Utilisation > 0.6 {
		t.Errorf("the slowest stage is busy for %.2f, the first for %.2f; %+v", u, r.Workers[0].Utilisation, r.Outcomes)
	}
}

func TestADeadlineCountsInALaterStageOfASimulation(t *testing.T) {
	first := stageOf(t, 1, 2*time.Millisecond)
	cfg := Config{
		Policy: first.Policy, Workers: first.Workers, Cost: first.Cost, Stages: []Stage{stageOf(t, 1, 20*time.Millisecond)},
		Arrivals: Poisson{Rate: 1000}, Load: Load{Deadline: 30 * time.Millisecond}, Requests: 1000, Hop: 10 * time.Microsecond,
	}
	r := mustRun(t, cfg)
	o := r.Outcomes
	if ended := o.Completed + o.Late + o.Expired + o.TimedOut + o.Refused; ended != 1000 || o.Completed == 0 || o.Expired+o.Refused == 0 {
		t.Errorf("%+v", o)
	}
}

func TestAStageOfTheCommandLineInheritsTheFirstOnesSettings(t *testing.T) {
	first := stageOf(t, 3, time.Millisecond)
	cfg := Config{Policy: first.Policy, Workers: first.Workers, Cost: first.Cost}
	f := Command{stages: []string{"1=2ms,32=9ms; workers=2; max_batch_size=32", "1=1ms"}}
	must.Do(t, f.setStages(&cfg))
	two, three := cfg.Stages[0], cfg.Stages[1]
	if two.Workers.Count != 2 || two.Policy.MaxBatchSize != 32 || two.Policy.WaitTime != 0 || two.Cost.Of(32) != 9*time.Millisecond ||
		three.Workers.Count != 3 || three.Policy.MaxBatchSize != 4 {
		t.Errorf("%+v", cfg.Stages)
	}
	for _, text := range []string{"", "1", "1=1ms; workers=many", "1=1ms; batch=3", "1=1ms; max_batch_size=0"} {
		f := Command{stages: []string{text}}
		must.Fail(t, text, f.setStages(&cfg), status.ErrInvalid)
	}
}
