// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"fmt"
	"math"
	"slices"
	"strconv"
	"time"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/internal/testbed"
	"github.com/ringbatch/ringbatch/stats"
)

// medianOf leaves its argument alone.
func medianOf(v []float64) float64 { return median(slices.Clone(v)) }

func millis(d time.Duration) float64 { return float64(d) / 1e6 }

// short is a number with three significant digits.
func short(v float64) string {
	switch a := math.Abs(v); {
	case a >= 100 || a == math.Trunc(a):
		return strconv.FormatFloat(v, 'f', 0, 64)
	case a >= 10:
		return strconv.FormatFloat(v, 'f', 1, 64)
	case a >= 0.1:
		return strconv.FormatFloat(v, 'f', 2, 64)
	default:
		return strconv.FormatFloat(v, 'g', 2, 64)
	}
}

// big is a number with its thousands apart.
func big(v float64) string {
	s := strconv.FormatFloat(math.Round(v), 'f', 0, 64)
	for i := len(s) - 3; i > 0 && s[i-1] != '-'; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

// pause sleeps unless the benchmark is interrupted.
func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return testbed.ErrInterrupted
	case <-time.After(d):
		return nil
	}
}

// modelStats asks the broker what it counted for a model.
func modelStats(ctx context.Context, socket, model string) (*stats.Model, error) {
	s, err := admin.New(socket).Stats(ctx)
	if err != nil {
		if ctx.Err() != nil {
			return nil, testbed.ErrInterrupted
		}
		return nil, fmt.Errorf("ask the broker for its statistics: %w", err)
	}
	if m := s.Model(model); m != nil {
		return m, nil
	}
	return nil, fmt.Errorf("the broker does not know model %q", model)
}
