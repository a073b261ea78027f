// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func BenchmarkNow(b *testing.B) {
	for b.Loop() {
		Now()
	}
}

func TestNowIsTheKernelsMonotonicClock(t *testing.T) {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
		t.Fatal(err)
	}
	if d := time.Duration(Now() - ts.Nano()); d < -time.Millisecond || d > time.Minute {
		t.Errorf("Now is %v after the kernel's clock", d)
	}
}
