// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"flag"
	"fmt"
	"strings"
	"testing"
	"time"
)

var (
	simSeed  = flag.Int64("seed", 0, "simulation: replay this one seed, with its trace")
	simSeeds = flag.Int64("seeds", 0, "simulation: how many seeds (1000, and 100 with -short)")
	simFirst = flag.Int64("first_seed", 1, "simulation: the first of them")
)

// TestEveryRequestEndsOnceInAnySimulatedWorld runs the broker's core through
// seeded schedules of commits, cancels, deaths, hangs, delays and nonsense.
// A failing seed replays exactly.
func TestEveryRequestEndsOnceInAnySimulatedWorld(t *testing.T) {
	if *simSeed != 0 {
		h, failure := simulate(*simSeed)
		t.Log("\n" + strings.Join(h.trace, "\n"))
		if failure != "" {
			t.Fatal(failure)
		}
		return
	}
	seeds := *simSeeds
	if seeds == 0 {
		seeds = int64(unlessShort(1000, 100))
	}
	accepted, ended, start := 0, 0, time.Now()
	for seed := *simFirst; seed < *simFirst+seeds; seed++ {
		h, failure := simulate(seed)
		if failure != "" {
			t.Fatalf("seed %d: %s\nreplay: go test ./broker/engine -run %s -v -seed %d", seed, failure, t.Name(), seed)
		}
		for _, s := range h.worlds {
			accepted += s.accepted
			ended += s.ended
		}
	}
	t.Logf("%d seeds, %d requests, %d ends seen by clients that lived to see them, %v",
		seeds, accepted, ended, time.Since(start).Round(time.Millisecond))
}

// simulate plays one seed. Most hosts have one ring, where a seed goes deepest;
// the others have several, on one or more loops.
func simulate(seed int64) (h *host, failure string) {
	loops, rings := 1, 1
	if seed%4 == 0 {
		loops, rings = 1+int(seed/4)%3, 2+int(seed/12)%4
	}
	h, err := newHost(seed, loops, rings)
	if err != nil {
		return h, err.Error()
	}
	defer h.close()
	defer func() {
		switch p := recover().(type) {
		case nil:
		case violation:
			failure = string(p)
		default:
			if *simSeed != 0 {
				panic(p) // with its stack
			}
			failure = fmt.Sprintf("panic: %v", p)
		}
	}()
	h.run()
	return h, ""
}

// unlessShort is how much a simulation does: it has one goroutine, so the race
// detector, whose run is the short one, has nothing to find in more of it.
func unlessShort(whole, short int) int {
	if testing.Short() {
		return short
	}
	return whole
}
