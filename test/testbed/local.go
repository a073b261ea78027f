// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/client/ringbatchtest"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/internal/testhooks"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/worker"
)

// StartOnHeap starts a broker for tests whose peers all live in this process, too: the race detector sees their shared memory.
func StartOnHeap(t testing.TB, cfg broker.Config) *ringbatchtest.Broker {
	t.Helper()
	return StartWith(t, cfg, shm.CreateOnHeap)
}

// StartWith starts a broker with a function that makes its segments.
func StartWith(t testing.TB, cfg broker.Config, create testhooks.Create) *ringbatchtest.Broker {
	t.Helper()
	dir, err := os.MkdirTemp("", "rb")
	must.Do(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) }) // after the broker's end
	cfg.Socket = filepath.Join(dir, "b.sock")
	testhooks.MakeSegments(cfg.Socket, create)
	return ringbatchtest.Start(t, cfg)
}

// WaitFor waits for a request for at most d: status.ErrTimeout if it goes on.
func WaitFor(r *client.Request, d time.Duration) error {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	defer cancel()
	err := r.Wait(ctx)
	if ctx.Err() != nil && errors.Is(r.Poll(), status.ErrNotDone) {
		return status.ErrTimeout
	}
	return err
}

// Touch asks for the memory of all outputs, as a worker does that writes them.
func Touch(b *worker.Batch) {
	for k := range b.Signature().Outputs {
		for i := range b.Runs() {
			b.Output(k).Run(i)
		}
	}
}
