// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/shm"
)

func TestAWorkerSpinsForAShareOfItsBatchTime(t *testing.T) {
	for _, c := range []struct{ took, spins time.Duration }{
		{0, shm.LeastSpin}, {time.Millisecond, 250 * time.Microsecond}, {time.Second, mostSpin},
	} {
		if got := time.Duration(spinFor(int64(c.took))); got != c.spins {
			t.Errorf("after a batch of %v it spins for %v, want %v", c.took, got, c.spins)
		}
	}
}
