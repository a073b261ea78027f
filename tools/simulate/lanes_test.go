// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"strings"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/status"
)

// decoder has 64 clients and a worker with that many lanes; 0: whole batches of 32.
func decoder(t *testing.T, lanes int, sigma float64) Config {
	cfg := Config{Policy: policy.Settings{MaxBatchSize: 32}, Arrivals: ClosedLoop{Clients: 64, InFlight: 1}, Workers: Workers{Count: 1},
		Cost: mustCost(t, "1=1ms,32=1ms"), Rounds: &Rounds{Median: 24, Sigma: sigma, Most: 256}, Requests: 4000, Seed: 3}
	if lanes > 0 {
		cfg.Policy.MaxBatchSize, cfg.Workers.Lanes, cfg.Workers.Depth = 1, lanes, lanes+lanes/8
	}
	return cfg
}

func TestARowInALaneTakesItsRounds(t *testing.T) {
	cfg := decoder(t, 4, 0)
	cfg.Arrivals, cfg.Hop = ClosedLoop{Clients: 1, InFlight: 1}, time.Microsecond
	r := mustRun(t, cfg)
	if want := 24*time.Millisecond + 3*time.Microsecond; r.Latency.P50 != want || r.Latency.Max != want {
		t.Errorf("%v to %v, want %v", r.Latency.P50, r.Latency.Max, want)
	}
	if r.Rounds != 24*cfg.Requests || r.MeanRoundRows != 1 {
		t.Errorf("%d rounds of %v rows", r.Rounds, r.MeanRoundRows)
	}
}

// The bound is 32 rows in each round; whole batches end with their longest row.
func TestLanesAreNeverFreeWhileRowsWait(t *testing.T) {
	lanes, whole, equal := mustRun(t, decoder(t, 32, 0.75)), mustRun(t, decoder(t, 0, 0.75)), mustRun(t, decoder(t, 0, 0))
	if lanes.MeanRoundRows < 31 {
		t.Errorf("%.1f rows in a round", lanes.MeanRoundRows)
	}
	if ratio := lanes.RequestsPerSecond / whole.RequestsPerSecond; ratio < 3 {
		t.Errorf("lanes give %.1f times the requests of whole batches", ratio)
	}
	if want := 32 / 0.024; !near(equal.RequestsPerSecond, want, 0.03) {
		t.Errorf("rows of one length: %.0f requests/s, want %.0f", equal.RequestsPerSecond, want)
	}
}

func TestALateRowLeavesItsLane(t *testing.T) {
	cfg := decoder(t, 4, 0.75)
	cfg.Arrivals, cfg.Load.Deadline = ClosedLoop{Clients: 4, InFlight: 1}, 30500*time.Microsecond
	r := mustRun(t, cfg)
	if o := r.Outcomes; o.Late == 0 || o.Refused != 0 || o.Completed+o.Late+o.Expired != cfg.Requests || r.Latency.Max > cfg.Load.Deadline {
		t.Errorf("%+v, at most %v", o, r.Latency.Max)
	}
	if n := r.MeanRoundRows * float64(r.Rounds); n > float64(32*cfg.Requests) { // 31 rounds in time, and one that ends late
		t.Errorf("%d requests took %.0f rounds", cfg.Requests, n)
	}
}

func TestRoundsAreCheckedByName(t *testing.T) {
	for _, text := range []string{"24", "24,x", "0,1", "24,0.75,0", "24,-1", "24,1,2,3", "NaN,1", "24,9"} {
		_, err := ParseRounds(text)
		must.Fail(t, text, err, status.ErrInvalid)
	}
	for _, flags := range [][]string{{"--lanes", "8"}, {"--lanes", "8", "--rounds", "24,1", "--max-batch-size", "8"},
		{"--lanes", "241", "--rounds", "24,1"}, {"--lanes", "-1", "--rounds", "24,1"}, {"--rounds", "24,1", "--workers", "1,2"},
		{"--rounds", "24,1", "--rows", "1-4"}} {
		_, err := command(t, flags...)
		must.Fail(t, strings.Join(flags, " "), err, status.ErrInvalid)
	}
	out, err := command(t, strings.Fields("--arrivals closed --clients 16 --lanes 8 --rounds 24,0.75,256 --requests 200")...)
	if err != nil || !strings.Contains(out, "whole batches of up to 8 give") {
		t.Errorf("%v: %s", err, out)
	}
}
