// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"os"
	"runtime"
	"time"

	"golang.org/x/sys/unix"
)

// shortSlice is the time slice that AskShortSlice asks for. Since Linux 6.12 the
// scheduler runs a thread with a short slice sooner after a wake-up, so a
// request waits less on its way when every core is busy.
const shortSlice = 100 * time.Microsecond

// SliceVariable is the environment variable that switches short slices off
// ("off") in a process: broker, worker, C and Python alike.
const SliceVariable = "RINGBATCH_SHORT_SLICE"

// AskShortSlice locks the goroutine to its thread, gives the thread a short
// time slice, and returns a function that undoes both. Threads and processes
// that the thread starts get the usual slice. Kernels before 6.12, scheduling
// policies other than the default, and SliceVariable=off leave the slice as
// it is.
func AskShortSlice() (undo func()) {
	runtime.LockOSThread()
	if os.Getenv(SliceVariable) == "off" || !setSlice(shortSlice) {
		return runtime.UnlockOSThread
	}
	return func() {
		setSlice(0) // the kernel's default
		runtime.UnlockOSThread()
	}
}

// ShortSliceWorks reports whether this kernel gives threads short slices.
func ShortSliceWorks() bool {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	defer setSlice(0)
	if !setSlice(shortSlice) {
		return false
	}
	attr, err := unix.SchedGetAttr(0, 0)
	return err == nil && attr.Runtime == uint64(shortSlice)
}

func setSlice(d time.Duration) bool {
	attr, err := unix.SchedGetAttr(0, 0)
	if err != nil || attr.Policy != unix.SCHED_NORMAL {
		return false
	}
	attr.Flags |= unix.SCHED_FLAG_RESET_ON_FORK
	attr.Runtime = uint64(d)
	return unix.SchedSetAttr(0, attr, 0) == nil
}
