// SPDX-License-Identifier: Apache-2.0

package profile

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/status"
)

// NoWorkerTime is how long a model may have no worker before nobody waits for one any more.
const NoWorkerTime = 10 * time.Second

// AwaitNoWorker returns an error when the model has had no worker for so long: what is in
// flight would wait for ever. It returns nil when ctx ends.
func AwaitNoWorker(ctx context.Context, a *admin.Client, model string, patience time.Duration) error {
	for last := time.Now(); ; {
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(min(time.Second, patience/2)):
		}
		if _, _, err := Workers(ctx, a, model); !errors.Is(err, status.ErrNoWorker) { // a broker that has gone ends what is in flight
			last = time.Now()
		}
		if time.Since(last) >= patience {
			return fmt.Errorf("%w: model %q has had none for %v", status.ErrNoWorker, model, patience)
		}
	}
}
