// SPDX-License-Identifier: Apache-2.0

package batcher

import (
	"testing"
	"time"
)

func TestOneSlowBatchOfARareSizeRefusesNobody(t *testing.T) {
	const ms = Time(time.Millisecond)
	var f floor
	for range floorBatches {
		f.observe(16, 36*ms, ms)
	}
	f.observe(12, 400*ms, ms)
	f.observe(4, 24*ms, ms)
	for rows, want := range map[int]Time{1: 0, 4: 24 * ms, 11: 24 * ms, 12: 24 * ms, 16: 36 * ms, 32: 36 * ms} {
		if got := f.of(rows); got != want {
			t.Errorf("a batch of %d rows takes %d ns at least, want %d", rows, got, want)
		}
	}

	// The first of the largest size is the one that allocates. If it is not the last, the others tell so.
	f.observe(32, 400*ms, ms)
	if got := f.of(32); got != 36*ms {
		t.Errorf("a rare batch of 32 rows takes %d ns at least, want as long as one of 16", got)
	}
	for range rareSize {
		f.observe(32, 400*ms, ms)
	}
	if got := f.of(32); got != 400*ms {
		t.Errorf("batches of 32 rows that are always slow take %d ns at least", got)
	}
}
