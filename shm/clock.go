// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"time"

	"golang.org/x/sys/unix"
)

// clockBase relates Go's monotonic clock to CLOCK_MONOTONIC, which all processes of a
// host share. time.Since uses the vDSO; a system call would cost more than a commit.
var clockBase = func() (base struct {
	start time.Time
	nanos int64
}) {
	best := int64(1 << 62)
	for range 16 { // keep the reading with the smallest uncertainty
		var ts unix.Timespec
		before := time.Now()
		_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts)
		if d := int64(time.Since(before)); d < best {
			best = d
			base.start, base.nanos = before, ts.Nano()-d/2
		}
	}
	return base
}()

// Now is CLOCK_MONOTONIC in nanoseconds. Processes of one host can compare it; changes of
// the wall clock do not affect it.
func Now() int64 { return clockBase.nanos + int64(time.Since(clockBase.start)) }

// Until converts a wall-clock time to Now's clock.
func Until(t time.Time) int64 { return Now() + int64(time.Until(t)) }
