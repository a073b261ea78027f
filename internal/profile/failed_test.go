// SPDX-License-Identifier: Apache-2.0

package profile

import (
	"context"
	"errors"
	"slices"
	"testing"
)

// failing is a run whose cells fail as often as fails says.
type failing struct {
	run
	fails      map[cell]int
	measured   []cell // that did not fail
	recoveries int
}

func newFailing(fails map[cell]int) *failing {
	f := &failing{run: run{profile: &Profile{}}, fails: fails}
	for _, busy := range []int{1, 2, 4} {
		for _, rows := range []int{1, 2, 8} {
			f.cells = append(f.cells, cell{rows, busy})
		}
	}
	f.o.Recover = func(context.Context) error { f.recoveries++; return nil }
	return f
}

var errNoRoom = errors.New("no room")

func (f *failing) measure(_ context.Context, c cell) error {
	if f.fails[c] > 0 {
		f.fails[c]--
		return &BatchError{c.rows, c.busy, errNoRoom}
	}
	f.measured = append(f.measured, c)
	return nil
}

func TestABatchThatFailsOnceIsTriedOnceMore(t *testing.T) {
	f := newFailing(map[cell]int{{1, 1}: 1, {8, 1}: 1, {2, 4}: 1})
	if err := f.measureAll(t.Context(), f.measure); err != nil || len(f.profile.Failed) != 0 || len(f.measured) != rounds*len(f.cells) || f.recoveries != 3 {
		t.Errorf("%v, %v left out, %d measured, %d recoveries", err, f.profile.Failed, len(f.measured), f.recoveries)
	}
}

func TestABatchThatFailsBesideOthersIsLeftOutOnlyBesideAsMany(t *testing.T) {
	f := newFailing(map[cell]int{{8, 2}: 2})
	if err := f.measureAll(t.Context(), f.measure); err != nil || f.recoveries != 2 {
		t.Fatalf("%v, %d recoveries", err, f.recoveries)
	}
	for _, c := range f.cells {
		fails := c == cell{8, 2} || c == cell{8, 4}
		if f.profile.Fails(c.rows, c.busy) != fails || slices.Contains(f.measured, c) == fails {
			t.Errorf("%+v: left out %v, want %v", c, !slices.Contains(f.measured, c), fails)
		}
	}
	if e := f.profile.Failed[0]; len(f.profile.Failed) != 1 || e.Error() != "batch of 8 rows, with 2 workers busy: no room" {
		t.Errorf("%v", f.profile.Failed)
	}
}

func TestWithoutTheSmallestBatchThereIsNoProfile(t *testing.T) {
	f := newFailing(map[cell]int{{1, 1}: 2})
	if err := f.measureAll(t.Context(), f.measure); !errors.Is(err, errNoRoom) {
		t.Errorf("the smallest fails: %v", err)
	}
	f = newFailing(map[cell]int{{8, 2}: 1})
	f.o.Recover = nil
	if err := f.measureAll(t.Context(), f.measure); !errors.Is(err, errNoRoom) {
		t.Errorf("nobody recovers: %v", err)
	}
}
