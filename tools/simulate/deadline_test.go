// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/broker/batcher"
	"github.com/ringbatch/ringbatch/policy"
)

// At twice the capacity nearly all that workers do is in time, however little is known
// of a single shape, and however many rows a worker sees of a batch.
func TestDeadlinesAreKeptWithManyShapesAndWithPadding(t *testing.T) {
	shapes := Config{
		Policy: policy.Settings{MaxBatchSize: 1, WaitTime: policy.Auto}, Workers: Workers{Count: 1}, Cost: mustCost(t, "1=20ms"),
		Arrivals: Poisson{Rate: 100}, Load: Load{Deadline: 30 * time.Millisecond, Shapes: 64},
	}
	padded := Config{
		Policy:  policy.Settings{MaxBatchSize: 4, WaitTime: 2 * time.Millisecond},
		Workers: Workers{Count: 1, Pad: batcher.PadFixed, PadTo: 32}, Cost: mustCost(t, "1=5ms,32=20ms"),
		Arrivals: Poisson{Rate: 400}, Load: Load{Deadline: 50 * time.Millisecond},
	}
	for name, c := range map[string]struct {
		cfg  Config
		each float64 // rows of a batch
		most float64 // batches in a second
		want float64 // of them in time, the share
	}{"64 shapes": {shapes, 1, 50, 0.75}, "padded": {padded, 4, 50, 0.95}} {
		cfg := c.cfg
		cfg.Hop, cfg.Seed, cfg.Requests = 7*time.Microsecond, 1, 5000
		r, err := Run(t.Context(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		if got := float64(r.Outcomes.Completed) / c.each / c.most / r.Span.Seconds(); got < c.want {
			t.Errorf("%s: %.2f of what workers can do is in time, of %.2f", name, got, c.want)
		}
	}
}
