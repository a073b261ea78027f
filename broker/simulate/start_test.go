// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/policy"
)

// isFound holds auto against the fixed waits with several seeds: whether it finds the
// right wait must not be a matter of luck.
func isFound(t *testing.T, cfg Config) {
	t.Helper()
	notShort(t)
	cfg.Hop = 7 * time.Microsecond
	for seed := range uint64(4) {
		cfg.Seed = seed
		r, err := compare(t.Context(), gridCell{cfg: cfg})
		if err != nil {
			t.Fatal(err)
		}
		if r.Mean > gridMean {
			t.Errorf("seed %d: mean %.3f times that of %s", seed, r.Mean, r.BestWait)
		}
	}
}

// With two clients and two workers each request goes alone, and what two rows take is
// not known before a wait has brought them together.
func TestAutoTriesABatchOfASizeThatWasNeverSeen(t *testing.T) {
	isFound(t, Config{
		Policy: policy.Settings{MaxBatchSize: 8}, Workers: Workers{Count: 2, Sharing: 0.6}, Cost: mustCost(t, "1=175us,2=204us,4=236us,8=285us"),
		Arrivals: ClosedLoop{Clients: 2, InFlight: 1, Think: 35 * time.Microsecond}, Requests: 20_000,
	})
}

// A wait that is a little longer than a batch keeps two workers apart, and each is done
// just when the other begins.
func TestAutoSeesThatBatchesFollowEachOther(t *testing.T) {
	isFound(t, Config{
		Policy: policy.Settings{MaxBatchSize: 128}, Workers: Workers{Count: 2, Sharing: 0.5}, Cost: mustCost(t, "1=234us,8=238us,128=257us"),
		Arrivals: Poisson{Rate: 15_950}, Load: Load{MinRows: 1, MaxRows: 4}, Requests: 80_000,
	})
}

// 80,000 requests are a sixth of a second here: the right wait is found in the first
// twentieth, or the many of then are what counts.
func TestAutoStartsWellWithAQuickModel(t *testing.T) {
	isFound(t, Config{
		Policy: policy.Settings{MaxBatchSize: 16}, Workers: Workers{Count: 4}, Cost: mustCost(t, "1=103us,16=103us"),
		Arrivals: Poisson{Rate: 528_000}, Requests: 80_000,
	})
}

// Three workers that share a GPU, and batches of 10 ms: until that they must go apart is found,
// all of them are slow. If that takes half a second, it is what p99 of a run of 24 s tells of.
func TestAutoLeavesASlowStartSoon(t *testing.T) {
	notShort(t)
	cfg := Config{
		Policy: policy.Settings{MaxBatchSize: 128}, Workers: Workers{Count: 3, Sharing: 1}, Cost: mustCost(t, "1=9.7ms,128=9.9ms"),
		Arrivals: Poisson{Rate: 820}, Load: Load{MinRows: 1, MaxRows: 4}, Requests: 20_000, Hop: 7 * time.Microsecond,
	}
	for seed := range uint64(4) {
		cfg.Seed = seed
		r, err := compare(t.Context(), gridCell{cfg: cfg})
		if err != nil {
			t.Fatal(err)
		}
		if r.Mean > gridMean || r.P99 > gridP99 {
			t.Errorf("seed %d: mean %.3f and p99 %.3f times those of %s", seed, r.Mean, r.P99, r.BestWait)
		}
	}
}

// Batches of 32 µs, and as long again for a worker to be seen to be done and be given the
// next: without that, replays had shorter waits than are good.
func TestAutoKnowsWhatHandingOverTakes(t *testing.T) {
	isFound(t, Config{
		Policy: policy.Settings{MaxBatchSize: 16}, Workers: Workers{Count: 4}, Cost: mustCost(t, "1=32us,4=32us,8=33us,16=35us"),
		Arrivals: Poisson{Rate: 745_000}, Requests: 80_000,
	})
}

// Fourteen clients and batches of eight: those that wait are two short of a batch when the
// others are answered, and a wait that ends just then is too short by a hair.
func TestAutoKeepsAwayFromTheEdgeInAClosedLoop(t *testing.T) {
	isFound(t, Config{
		Policy: policy.Settings{MaxBatchSize: 8}, Workers: Workers{Count: 1}, Cost: mustCost(t, "1=1.787ms,2=1.807ms,4=1.855ms,8=1.973ms"),
		Arrivals: ClosedLoop{Clients: 14, InFlight: 1}, Requests: 20_000,
	})
}

// Workers that slow each other down as if they took turns: to take turns is better than
// what any wait can do.
func TestWorkersThatShareTakeTurns(t *testing.T) {
	notShort(t)
	cfg := Config{
		Policy: policy.Settings{MaxBatchSize: 64}, Workers: Workers{Count: 4, Sharing: 0.7}, Cost: mustCost(t, "1=1.676ms,64=1.69ms"),
		Arrivals: Poisson{Rate: 8_800}, Requests: 80_000, Hop: 7 * time.Microsecond,
	}
	r, err := compare(t.Context(), gridCell{cfg: cfg})
	if err != nil {
		t.Fatal(err)
	}
	if r.Mean > 0.95 || r.P99 > 1 {
		t.Errorf("mean %.3f and p99 %.3f times those of %s", r.Mean, r.P99, r.BestWait)
	}
}
