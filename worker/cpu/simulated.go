// SPDX-License-Identifier: Apache-2.0

package cpu

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/worker"
)

// newSimulated echoes, and sleeps for a fixed time per batch and a time per row, as an
// accelerator would take.
func newSimulated(o Options) (*Model, error) {
	if o.FixedCost < 0 || o.ItemCost < 0 || o.FixedCost > time.Minute || o.ItemCost > time.Minute {
		return nil, fmt.Errorf("%w: simulated costs must be between 0 and 1m, got %v and %v per row", status.ErrInvalid,
			o.FixedCost, o.ItemCost)
	}
	m, err := newEcho(o)
	if err != nil {
		return nil, err
	}
	echo, alone := m.Run, m.Alone
	m.Run = func(ctx context.Context, b *worker.Batch) error {
		end := shm.Now() + o.cost(b.PadTo())
		if err := echo(ctx, b); err != nil {
			return err
		}
		sleepUntil(end)
		return nil
	}
	m.Alone = func(rows int) func() {
		copyRows := alone(rows)
		return func() {
			end := shm.Now() + o.cost(rows)
			copyRows()
			sleepUntil(end)
		}
	}
	m.Note = fmt.Sprintf("simulated: sleeps %v per batch and %v per row, computes nothing", o.FixedCost, o.ItemCost)
	return m, nil
}

func (o *Options) cost(rows int) int64 { return int64(o.FixedCost) + int64(rows)*int64(o.ItemCost) }

// sleepUntil sleeps until a time on shm.Now's clock, more exactly than Go's timers.
func sleepUntil(nanos int64) {
	ts := unix.NsecToTimespec(nanos)
	for errors.Is(unix.ClockNanosleep(unix.CLOCK_MONOTONIC, unix.TIMER_ABSTIME, &ts, nil), unix.EINTR) {
	}
}
