// SPDX-License-Identifier: Apache-2.0

package alias_test

import (
	"errors"
	"math"
	"strings"
	"testing"

	"github.com/ringbatch/ringbatch/admin/alias"
	"github.com/ringbatch/ringbatch/status"
)

func TestAnAliasIsReadAndWrittenAlike(t *testing.T) {
	for given, want := range map[string]string{
		"m@2": "m@2", "m@2=100": "m@2", "b=10 a=90": "a=90 b=10", "a=0.01 b=99.99%": "a=0.01 b=99.99", "x=y=50 z=50": "x=y=50 z=50",
	} {
		a, err := alias.Parse("m", strings.Fields(given)...)
		if err != nil || a.String() != want {
			t.Errorf("%q: %q, %v", given, a.String(), err)
		}
	}
}

func TestWhatCannotBeAnAliasIsRefusedWithAReason(t *testing.T) {
	for _, c := range []struct{ name, targets, says string }{
		{"m", "", "1..8 models, got 0"},
		{"m", "a=90 b=9", "add up to 99 %"},
		{"m", "a=90 b=11", "add up to 101 %"},
		{"m", "a b", "has no share"},
		{"m", "a=0 b=100", "above 0"},
		{"m", "a=-5 b=105", "above 0"},
		{"m", "a=NaN b=50", "above 0"},
		{"m", "a=0.001 b=99.999", "steps of 0.01"},
		{"m", "a=half b=50", "no number"},
		{"m", "a=50 a=50", "named twice"},
		{"m", "m", "cannot stand for itself"},
		{"m", "a\x1b", "no model's name"},
		{"m\x00", "a", "a name is 1..128 bytes"},
		{"", "a", "a name is"},
		{strings.Repeat("m", 129), "a", "a name is"},
		{"m", "1=10 2=10 3=10 4=10 5=10 6=10 7=10 8=10 9=20", "1..8 models, got 9"},
	} {
		_, err := alias.Parse(c.name, strings.Fields(c.targets)...)
		if !errors.Is(err, status.ErrInvalid) || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%q %q: %v", c.name, c.targets, err)
		}
	}
}

func TestRequestsAreSharedExactlyAndSpreadEvenly(t *testing.T) {
	a, err := alias.Parse("m", "a=89.5", "b=10", "c=0.5")
	if err != nil {
		t.Fatal(err)
	}
	for _, start := range []uint64{0, 1 << 40, math.MaxUint64 - 20000} {
		got, gap, longest := map[string]int{}, 0, 0
		for n := range uint64(40000) {
			model := a.To[a.Turn(start+n)].Model
			got[model]++
			if gap++; model == "b" {
				longest, gap = max(longest, gap), 0
			}
		}
		if math.Abs(float64(got["b"])-4000) > 10 || math.Abs(float64(got["c"])-200) > 10 || longest > 20 {
			t.Errorf("from %d: %v, %d requests between two of b", start, got, longest)
		}
	}
}

func TestAVersionIsWhatFollowsTheLastAt(t *testing.T) {
	for model, want := range map[string]string{"m@2": "2", "m": "", "a@b@2024-01": "2024-01", "m@": ""} {
		if got := alias.Version(model); got != want {
			t.Errorf("%q: %q", model, got)
		}
	}
}
