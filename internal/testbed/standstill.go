// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"runtime"
	"time"

	"golang.org/x/sys/unix"
)

// WatchCPUs naps again and again on every CPU until over is closed, and calls
// napped with when each nap began: one that took much longer says that the CPU
// stood still. A hypervisor may take one away while the others run.
func WatchCPUs(over <-chan struct{}, nap time.Duration, napped func(began time.Time)) {
	var cpus unix.CPUSet
	if unix.SchedGetaffinity(0, &cpus) != nil {
		return
	}
	for cpu := range 64 * len(cpus) {
		if cpus.IsSet(cpu) {
			go watchCPU(cpu, over, nap, napped)
		}
	}
}

func watchCPU(cpu int, over <-chan struct{}, nap time.Duration, napped func(began time.Time)) {
	runtime.LockOSThread() // the thread ends with this goroutine
	var only unix.CPUSet
	only.Set(cpu)
	if unix.SchedSetaffinity(0, &only) != nil {
		return
	}
	_ = unix.Setpriority(unix.PRIO_PROCESS, unix.Gettid(), -20) // where it may: other processes are not what it looks for
	for d := unix.NsecToTimespec(int64(nap)); ; {
		began := time.Now()
		_ = unix.Nanosleep(&d, nil)
		select {
		case <-over:
			return
		default:
		}
		napped(began)
	}
}
