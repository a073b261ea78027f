// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"errors"

	"golang.org/x/sys/unix"
)

// sleepUntil parks the thread until a time on shm.Now's clock. Go's own timer
// would be rounded and go through the scheduler; at thousands of requests per
// second that is part of the measurement.
func sleepUntil(nanos int64) {
	ts := unix.NsecToTimespec(nanos)
	for {
		err := unix.ClockNanosleep(unix.CLOCK_MONOTONIC, unix.TIMER_ABSTIME, &ts, nil)
		if !errors.Is(err, unix.EINTR) {
			return
		}
	}
}
