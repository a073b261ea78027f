// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"math"
	"testing"
	"time"
)

func TestSpinsOnlyWhileWaitsAreShort(t *testing.T) {
	looked := 0
	comesAt := func(n int) func() bool {
		looked = 0
		return func() bool { looked++; return looked == n }
	}
	s := Spin{Limit: int64(time.Hour)} // so that "soon" does not hang on the machine's load
	if s.Until(comesAt(1), math.MaxInt64) || looked != 0 {
		t.Error("spins before it ever waited")
	}
	s.Over() // at once
	if !s.pays {
		t.Error("it came at once, and spinning does not pay")
	}
	if !s.Until(comesAt(3), math.MaxInt64) || looked != 3 {
		t.Errorf("looked %d times for what was there at the third", looked)
	}
	s.Over()
	s.Limit = int64(time.Millisecond)
	if s.Until(comesAt(-1), math.MaxInt64) {
		t.Error("it came from nowhere")
	}
	s.Over() // too late
	if s.Until(comesAt(1), math.MaxInt64) {
		t.Error("spins although the last wait was long")
	}
}

func TestASpinEndsWithTheCallersTime(t *testing.T) {
	s := Spin{Limit: int64(time.Hour), pays: true}
	if s.Until(func() bool { return false }, Now()+int64(time.Millisecond)) {
		t.Error("it came from nowhere")
	}
}

func TestWhatWasBeforeAnewDoesNotCountAsWaiting(t *testing.T) {
	s := Spin{Limit: int64(time.Minute), since: Now() - int64(time.Hour)}
	s.Anew(Now())
	s.Over()
	if !s.pays {
		t.Error("it came right after, and spinning does not pay")
	}
}
