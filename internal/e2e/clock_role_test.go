// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os/signal"
	"syscall"
	"time"

	"github.com/ringbatch/ringbatch/internal/testbed"
	"golang.org/x/sys/unix"
)

const (
	jumps    = 16
	jump     = time.Minute
	mostOff  = 100 * time.Millisecond // how long a jump lasts at most
	mostCalm = 250 * time.Millisecond // and until the next
)

// playClock sets the machine's clock forth and back. It is a process of its
// own so that the clock is put right whatever becomes of the test: it ends by
// itself, and before that at SIGTERM.
func playClock(c *testbed.Child) error {
	ctx := c.Context()
	// Nothing may keep us from putting the clock right: no signal meant for
	// the test, no reader that is gone, no busier process.
	signal.Ignore(syscall.SIGINT, syscall.SIGHUP, syscall.SIGPIPE)
	_ = unix.Setpriority(unix.PRIO_PROCESS, 0, -10)
	clock := newWallClock()
	if err := clock.set(0); err != nil {
		return fmt.Errorf("clock_settime: %w", err)
	}
	_ = c.Tell("jumping", nil)
	defer clock.putRight()
	for i := 0; i < jumps && ctx.Err() == nil; i++ {
		by := jump
		if i%2 == 1 {
			by = -jump
		}
		if err := clock.set(by); err != nil {
			return err
		}
		pause(ctx, mostOff)
		clock.putRight()
		pause(ctx, mostCalm)
	}
	return nil
}

// pause waits for a while of at most d.
func pause(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(rand.N(d)):
	}
}

// wallClock remembers how far CLOCK_REALTIME should be ahead of
// CLOCK_MONOTONIC.
type wallClock struct{ ahead int64 }

func newWallClock() *wallClock { return &wallClock{ahead()} }

// ahead measures it, several times: the closest two readings count.
func ahead() (d int64) {
	best := int64(1 << 62)
	for range 16 {
		before, real, after := reading(unix.CLOCK_MONOTONIC), reading(unix.CLOCK_REALTIME), reading(unix.CLOCK_MONOTONIC)
		if after-before < best {
			best, d = after-before, real-(before+after)/2
		}
	}
	return d
}

func reading(clock int32) int64 {
	var ts unix.Timespec
	_ = unix.ClockGettime(clock, &ts)
	return ts.Nano()
}

func (c *wallClock) set(off time.Duration) error {
	ts := unix.NsecToTimespec(reading(unix.CLOCK_MONOTONIC) + c.ahead + int64(off))
	return unix.ClockSettime(unix.CLOCK_REALTIME, &ts)
}

// putRight sets the clock to what it would be had nobody touched it. We may
// have been interrupted between reading and setting: then once more.
func (c *wallClock) putRight() {
	for range 100 {
		_ = c.set(0)
		if d := time.Duration(ahead() - c.ahead).Abs(); d < 20*time.Microsecond {
			return
		}
	}
}
