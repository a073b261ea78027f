// SPDX-License-Identifier: Apache-2.0

package load

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/admin/stats"
	"github.com/ringbatch/ringbatch/internal/progress"
)

// Pause sleeps unless the benchmark is interrupted.
func Pause(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return progress.ErrInterrupted
	case <-time.After(d):
		return nil
	}
}

// SleepUntil parks the thread until a time on shm.Now's clock. Go's own timer would be rounded and go through the scheduler;
// at thousands of requests per second that is part of the measurement.
func SleepUntil(nanos int64) {
	ts := unix.NsecToTimespec(nanos)
	for errors.Is(unix.ClockNanosleep(unix.CLOCK_MONOTONIC, unix.TIMER_ABSTIME, &ts, nil), unix.EINTR) {
	}
}

// LeadTime lets every process receive its order before the common start.
const LeadTime = 30 * time.Millisecond

// ModelStats asks the broker for the statistics of a model.
func ModelStats(ctx context.Context, socket, model string) (*stats.Model, error) {
	s, err := admin.New(socket).Stats(ctx)
	if err != nil {
		if ctx.Err() != nil {
			return nil, progress.ErrInterrupted
		}
		return nil, fmt.Errorf("ask the broker for its statistics: %w", err)
	}
	if m := s.Model(model); m != nil {
		return m, nil
	}
	return nil, fmt.Errorf("the broker does not know model %q", model)
}
