// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"math"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/broker/simulate"
)

func config(t *testing.T, route Route, rate float64) Config {
	t.Helper()
	cost, err := simulate.ParseCost("1=3ms,32=8ms")
	if err != nil {
		t.Fatal(err)
	}
	return Config{Hosts: 8, Fronts: 4, Workers: 1, Route: route, Rate: rate, Requests: 20_000, MaxBatch: 32, Wait: time.Millisecond,
		Cost: cost, Network: 100 * time.Microsecond, Stale: 50 * time.Millisecond, Window: 2, Seed: 1, Detect: 100 * time.Millisecond, Outage: time.Second}
}

func TestEveryRouteAnswersEveryRequestAlsoWhenHostsFail(t *testing.T) {
	for _, route := range Routes() {
		for _, failures := range []float64{0, 2000} { // an hour: every two seconds
			cfg := config(t, route, 8000)
			cfg.Failures = failures
			r, err := Run(context.Background(), cfg)
			if err != nil {
				t.Fatalf("%s: %v", route, err)
			}
			if r.Requests != cfg.Requests || r.P50MS < 3 || r.MeanBatch < 1 || r.GPUSeconds <= 0 {
				t.Errorf("%s: %+v", route, r)
			}
			if failures > 0 && r.Resent == 0 {
				t.Errorf("%s: hosts failed and nothing was sent again", route)
			}
		}
	}
}

// Nothing is sent to and fro until one is back, and no reports are made that nobody could tell apart.
func TestWhileAllHostsAreDownRequestsWait(t *testing.T) {
	for _, route := range Routes() {
		cfg := config(t, route, 8000)
		cfg.Hosts, cfg.Failures, cfg.Detect, cfg.Network, cfg.Outage = 1, 2000, 0, 0, 24*time.Hour
		r, err := Run(context.Background(), cfg)
		if err != nil || r.Requests != cfg.Requests {
			t.Errorf("%s: %+v, %v", route, r, err)
		}
	}
}

func TestHostsThatHardlyEverFailAreAsGoodAsThoseThatNeverDo(t *testing.T) {
	never, err := Run(context.Background(), config(t, LeastRequest, 8000))
	if err != nil {
		t.Fatal(err)
	}
	for _, failures := range []float64{1e-6, 1e-9, 1e-300} {
		cfg := config(t, LeastRequest, 8000)
		cfg.Failures = failures
		if r, err := Run(context.Background(), cfg); err != nil || r.Resent > 0 || r.MeanMS > 1.5*never.MeanMS {
			t.Errorf("%v failures an hour: %+v, %v", failures, r, err)
		}
	}
}

func TestTheSameConfigurationGivesTheSameResult(t *testing.T) {
	for _, route := range Routes() {
		cfg := config(t, route, 5000)
		cfg.Failures, cfg.Requests = 1000, 5000
		a, err := Run(context.Background(), cfg)
		b, again := Run(context.Background(), cfg)
		if err != nil || again != nil || *a != *b {
			t.Errorf("%s: %+v and %+v, %v, %v", route, a, b, err, again)
		}
	}
}

func TestAtLightLoadFillUsesFewHosts(t *testing.T) {
	fill, err := Run(context.Background(), config(t, Fill, 800))
	least, again := Run(context.Background(), config(t, LeastRequest, 800))
	if err != nil || again != nil {
		t.Fatal(err, again)
	}
	if fill.HostsUsed > least.HostsUsed/2 {
		t.Errorf("fill uses %.1f hosts, least_request %.1f", fill.HostsUsed, least.HostsUsed)
	}
}

func TestAConfigurationThatMakesNoSenseIsRefused(t *testing.T) {
	for _, change := range []func(*Config){
		func(c *Config) { c.Hosts = 0 }, func(c *Config) { c.Rate = -1 }, func(c *Config) { c.Route = "best" }, func(c *Config) { c.Requests = 0 },
		func(c *Config) { c.Network = -1 }, func(c *Config) { c.Cost = nil }, func(c *Config) { c.Window = 0 },
		func(c *Config) { c.Failures = math.NaN() }, func(c *Config) { c.Network = math.MaxInt64 }, // no end, or one before the beginning
		func(c *Config) { c.Failures = 1e9 }, func(c *Config) { c.Rate = 1e-9 },
		func(c *Config) { c.Failures, c.Network = 60, time.Hour }, // nothing would arrive
	} {
		cfg := config(t, Random, 100)
		change(&cfg)
		if _, err := Run(context.Background(), cfg); err == nil {
			t.Errorf("%+v was run", cfg)
		}
	}
}
