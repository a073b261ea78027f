// SPDX-License-Identifier: Apache-2.0

package rig

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/ringbatch/ringbatch/internal/must"
)

// hack/results.py reads these keys.
func TestASuiteWritesItsChecksAndThoseBeforeAnError(t *testing.T) {
	s := Suite{Name: "relay", Rounds: 1, Round: 1e9, Parts: []Part{
		{"rate", func(r *Rig) { r.Check("rate", 2, ">=", 1.5, "%d against 1", 2) }},
		{"left_out", func(r *Rig) { r.Must(errors.New("it ran")) }},
		{"wait", func(r *Rig) {
			r.Check("wait", 2, "<=", 1.5, "")
			r.Check("free", 1, "", 0, "")
			r.Must(errors.New("broken"))
		}},
	}}
	file := filepath.Join(t.TempDir(), "checks.json")
	var out strings.Builder
	err := s.Run(t.Context(), []string{"--only=rate,wait", "--json=" + file}, &out)
	if err == nil || err.Error() != "wait: broken" || !strings.Contains(out.String(), "2 against 1") || !strings.Contains(out.String(),
		"MISS") {
		t.Errorf("%v:\n%s", err, &out)
	}
	data, err := os.ReadFile(file)
	must.Do(t, err)
	var got struct {
		Suite string
		Relay struct {
			Checks []check
			Rate   float64
		}
	}
	want := []check{{"rate", 2, ">= 1.5", true, "2 against 1"}, {"wait", 2, "<= 1.5", false, ""}, {"free", 1, "-", true, ""}}
	err = json.Unmarshal(data, &got)
	if err != nil || got.Suite != "relay" || got.Relay.Rate != 2 || !slices.Equal(got.Relay.Checks, want) {
		t.Errorf("%v: %s", err, data)
	}
}

func TestBadFlagsOfASuiteAreRefused(t *testing.T) {
	s := Suite{Name: "x", Rounds: 1, Round: 1e9, Parts: []Part{{"a", nil}}}
	for args, want := range map[string]string{
		"--only=speed": `no part "speed"; there are a`, "--rounds=0": "--rounds must be at least 1", "--round=1ms": "--round at least 50ms",
		"more": "takes flags only", "--json=/nowhere/r.json": "cannot be written", "--worker_num=3": "unknown flag",
	} {
		if err := s.Run(t.Context(), []string{args}, &strings.Builder{}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", args, err)
		}
	}
}

func TestTheMedianIsTheMiddle(t *testing.T) {
	for _, c := range []struct {
		v    []float64
		want float64
	}{{nil, 0}, {[]float64{3}, 3}, {[]float64{9, 1, 2}, 2}, {[]float64{4, 1, 3, 2}, 2.5}} {
		before := slices.Clone(c.v)
		if got := Median(c.v); got != c.want || !slices.Equal(c.v, before) {
			t.Errorf("median of %v is %v, want %v", before, got, c.want)
		}
	}
}
