// SPDX-License-Identifier: Apache-2.0

package load

import (
	"encoding/json"
	"math"
	"testing"
	"time"
)

func TestSecondsAreANumberOrADuration(t *testing.T) {
	for text, want := range map[string]time.Duration{"0.005": 5 * time.Millisecond, "10ms": 10 * time.Millisecond, "0": 0,
		"2": 2 * time.Second, "1.5s": 1500 * time.Millisecond} {
		var s Seconds
		if err := s.Set(text); err != nil || s.D() != want {
			t.Errorf("%s: %v, %v; want %v", text, s, err, want)
		}
	}
	for _, text := range []string{"", "ten", "NaN", "1e99", "5 ms"} {
		if err := new(Seconds).Set(text); err == nil {
			t.Errorf("%q was accepted", text)
		}
	}
	data, err := json.Marshal(Seconds(5 * time.Millisecond))
	if err != nil || string(data) != "0.005" {
		t.Errorf("as JSON %s, %v", data, err)
	}
}

func TestThreeWindowsMustAgreeInThroughputAndLatency(t *testing.T) {
	steady := sample{100, 10}
	for _, c := range []struct {
		name    string
		windows []sample
		want    bool
	}{
		{"too few", []sample{steady, steady}, false},
		{"alike", []sample{steady, steady, steady}, true},
		{"within ten percent", []sample{{95, 10}, {100, 10.5}, {105, 9.5}}, true},
		{"throughput off", []sample{{70, 10}, {100, 10}, {100, 10}}, false},
		{"latency off", []sample{{100, 10}, {100, 10}, {100, 14}}, false},
		{"only the last three count", []sample{{1, 500}, steady, steady, steady}, true},
		{"nothing happened", []sample{{}, {}, {}}, false},
	} {
		if got := stable(c.windows, 10); got != c.want {
			t.Errorf("%s: stable is %v", c.name, got)
		}
	}
}

func TestARateOfNearlyNothingNeverComesToATurn(t *testing.T) {
	s := newSchedule(0, 1e-300, 7)
	for range 3 {
		if at := s.arrival(); at < int64(time.Hour) {
			t.Errorf("arrival at %d", at)
		}
	}
}

func TestArrivalsArePoisson(t *testing.T) {
	const n, rate = 200_000, 1000.0
	s := newSchedule(0, rate, 7)
	var last int64
	var sum, squares float64
	for range n {
		at := s.arrival()
		gap := float64(at-last) / 1e9
		if gap < 0 {
			t.Fatal("an arrival before the one before it")
		}
		sum, squares, last = sum+gap, squares+gap*gap, at
	}
	mean := sum / n
	deviation := math.Sqrt(squares/n - mean*mean)
	// Exponential gaps: the deviation equals the mean.
	if math.Abs(mean*rate-1) > 0.02 || math.Abs(deviation*rate-1) > 0.02 {
		t.Errorf("mean gap %v s, deviation %v s, want both %v", mean, deviation, 1/rate)
	}
	a, b := newSchedule(0, rate, 7), newSchedule(0, rate, 7)
	for range 100 {
		if a.arrival() != b.arrival() {
			t.Fatal("the same seed gave other arrivals")
		}
	}
}
