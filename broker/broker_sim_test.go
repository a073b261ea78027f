package broker

import (
	"flag"
	"fmt"
	"strings"
	"testing"
	"time"
)

var (
	simSeed  = flag.Int64("seed", 0, "simulation: replay this one seed, with its trace")
	simSeeds = flag.Int64("seeds", 2000, "simulation: how many seeds")
	simFirst = flag.Int64("first_seed", 1, "simulation: the first of them")
)

// TestEveryRequestEndsOnceInAnySimulatedWorld runs the broker's core through
// seeded schedules of commits, cancels, deaths, hangs, delays and nonsense.
// A failing seed replays exactly.
func TestEveryRequestEndsOnceInAnySimulatedWorld(t *testing.T) {
	if *simSeed != 0 {
		s, failure := simulate(*simSeed)
		t.Log("\n" + strings.Join(s.trace, "\n"))
		if failure != "" {
			t.Fatal(failure)
		}
		return
	}
	accepted, ended, start := 0, 0, time.Now()
	for seed := *simFirst; seed < *simFirst+*simSeeds; seed++ {
		s, failure := simulate(seed)
		if failure != "" {
			t.Fatalf("seed %d: %s\nreplay: go test ./broker -run %s -v -seed %d", seed, failure, t.Name(), seed)
		}
		accepted += s.accepted
		ended += s.ended
	}
	t.Logf("%d seeds, %d requests, %d ends seen by clients that lived to see them, %v", *simSeeds, accepted, ended, time.Since(start).Round(time.Millisecond))
}

func simulate(seed int64) (s *world, failure string) {
	s, err := newWorld(seed)
	if err != nil {
		return s, err.Error()
	}
	defer s.close()
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
	s.run()
	return s, ""
}
