// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"context"
	"fmt"
	"time"

	"github.com/ringbatch/ringbatch/broker/batcher"
)

// Capacity is how many requests per second the workers can do in full batches, each two hops after the
// last, with the best number of busy workers.
func Capacity(cfg *Config) float64 {
	best := 0.0
	for k := 1; k <= cfg.Workers.Count; k++ {
		took := (cfg.took(cfg.Policy.MaxBatchSize, k-1) + 2*float64(cfg.Hop)) / float64(time.Second)
		best = max(best, float64(k*cfg.Policy.MaxBatchSize)/took)
	}
	return best / (float64(max(1, cfg.Load.MinRows)+max(1, cfg.Load.MaxRows)) / 2)
}

// FullBatch is the time of a full batch while all workers are busy.
func FullBatch(cfg *Config) float64 { return cfg.took(cfg.Policy.MaxBatchSize, cfg.Workers.Count-1) }

// MeanBetween is the mean latency, in nanoseconds, of requests that were committed in a part of the
// run. The run ends after it.
func MeanBetween(ctx context.Context, cfg Config, from, to time.Duration) (float64, error) {
	cfg.Requests = 1 << 20
	w, err := newWorld(cfg)
	if err != nil {
		return 0, err
	}
	sum, n := 0.0, 0
	w.answered = func(committed, answered batcher.Time) {
		if committed >= batcher.Time(from) && committed < batcher.Time(to) {
			sum += float64(answered - committed)
			n++
		}
		if committed >= batcher.Time(to) {
			w.scheduled = cfg.Requests // no more
		}
	}
	if err := w.run(ctx); err != nil {
		return 0, err
	}
	if n == 0 {
		return 0, fmt.Errorf("no request came between %v and %v", from, to)
	}
	return sum / float64(n), nil
}
