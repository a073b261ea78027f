// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/internal/must"
)

func TestNowIsTheKernelsMonotonicClock(t *testing.T) {
	var ts unix.Timespec
	must.Do(t, unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts))
	if d := time.Duration(Now() - ts.Nano()); d < -time.Millisecond || d > time.Minute {
		t.Errorf("Now is %v after the kernel's clock", d)
	}
}
