// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"sync"
	"sync/atomic"

	"github.com/ringbatch/ringbatch/shm"
)

// inFlight keeps the whole window in flight, one goroutine per slot, until
// that many requests have been answered. A lost wake-up leaves a goroutine
// waiting for ever: the parent sees that nothing comes back.
func (t *transport) inFlight(ctx context.Context, o transportOrder, input []byte) (transportResult, error) {
	var left atomic.Int64
	left.Store(int64(o.Count))
	var wg sync.WaitGroup
	errs := make(chan error, 1)
	start := shm.Now()
	for range t.job.Window {
		wg.Go(func() {
			for left.Add(-1) >= 0 {
				if err := t.one(ctx, t.sessions[0], input); err != nil {
					select {
					case errs <- err:
					default:
					}
					return
				}
			}
		})
	}
	wg.Wait()
	select {
	case err := <-errs:
		return transportResult{}, err
	default:
	}
	return transportResult{Requests: o.Count, Nanos: shm.Now() - start}, nil
}
