// SPDX-License-Identifier: Apache-2.0

package batcher

import (
	"slices"

	"github.com/ringbatch/ringbatch/policy"
)

// DeadlineOf is the deadline that a request of a level has, for as long as it
// waits and runs: its own, or sooner if the level does not allow as much time.
func DeadlineOf(s *policy.Settings, level int, arrived, own Time) Time {
	if level == DefaultLevel {
		level = s.DefaultPriority
	}
	if level >= 0 && s.Level(level).MaxTimeout > 0 {
		own = min(own, arrived+Time(s.Level(level).MaxTimeout))
	}
	return own
}

// bucket rounds d up to the declared bucket sizes.
func bucket(s *policy.Settings, d Dims) (Dims, error) {
	for i, sizes := range s.Buckets {
		if len(sizes) == 0 {
			continue
		}
		j, _ := slices.BinarySearch(sizes, d[i])
		if j == len(sizes) {
			return d, ErrTooLong
		}
		d[i] = sizes[j]
	}
	return d, nil
}

// costOfRow is the cost of a row of r, whose Dims are bucketed.
func costOfRow(s *policy.Settings, r *Request) int {
	if r.Cost > 0 {
		return min(r.Cost, policy.MaxCost)
	}
	return int(min(max(1, r.Dims[s.Cost]), policy.MaxCost))
}

// padTo is the number of rows w should see for a batch of rows rows.
func padTo(s *policy.Settings, w *Worker, rows int) int {
	switch w.Pad {
	case PadFixed:
		return max(w.PadTo, rows)
	case PadPreferred:
		i, _ := slices.BinarySearch(s.PreferredBatchSizes, rows)
		if i < len(s.PreferredBatchSizes) {
			return s.PreferredBatchSizes[i]
		}
		return s.MaxBatchSize
	}
	return rows
}
