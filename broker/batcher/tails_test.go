// SPDX-License-Identifier: Apache-2.0

package batcher

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

func TestTheTailIsThatOfAllReplaysTogether(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	var together latencies
	var all []float64
	for range 40 { // one replay in ten sees a burst
		var l latencies
		mean := 5e6
		if rng.IntN(10) == 0 {
			mean = 3e7
		}
		for range 300 {
			x := Time(rng.ExpFloat64()*mean) + 1
			l.note(x)
			all = append(all, float64(x))
		}
		together.add(1, &l)
	}
	slices.Sort(all)
	slowest := all[len(all)-int(tailShare*float64(len(all))):]
	want := 0.0
	for _, x := range slowest {
		want += x / float64(len(slowest))
	}
	if got := together.tail(); math.Abs(got/want-1) > 0.03 {
		t.Errorf("%.3g, want %.3g", got, want)
	}
}

func TestWhatIsForgottenIsNoTail(t *testing.T) {
	var l, slow latencies
	for range 100 {
		slow.note(Time(time.Second))
	}
	l.add(1, &slow)
	var now latencies
	for range 1000 {
		now.note(Time(time.Millisecond))
	}
	l.add(0.001, &now)
	if got := l.tail(); got > float64(10*time.Millisecond) {
		t.Errorf("%v, of requests that took 1 ms", time.Duration(got))
	}
}

func TestEveryLatencyHasAClass(t *testing.T) {
	last := 0
	for x := Time(1); x > 0 && x < math.MaxInt64/2; x += x/16 + 1 {
		c := latencyClass(x)
		if c < last || c > last+1 || c >= latencyClasses {
			t.Fatalf("%v is of class %d, what is a little shorter of %d", time.Duration(x), c, last)
		}
		last = c
	}
	if last != latencyClasses-1 {
		t.Errorf("the last class is %d", last)
	}
}
