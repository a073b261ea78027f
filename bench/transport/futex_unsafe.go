// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"fmt"
	"runtime"
	"runtime/debug"
	"slices"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/test/testbed"
)

// The futex round trip: two processes, two words of shared memory, each process parked
// while the other runs, each on its own core. It is the price of the hardware and the
// kernel for waking a process and being woken. (Without pinning, the kernel may put both
// on one core: a context switch, which takes a third of the time.)

const (
	pingAt = 0
	pongAt = 64
)

// mapWords maps descriptor 3, the shared page.
func mapWords() (ping, pong *atomic.Uint32, err error) {
	mem, err := unix.Mmap(3, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, nil, fmt.Errorf("map futex page: %w", err)
	}
	return (*atomic.Uint32)(unsafe.Pointer(&mem[pingAt])), (*atomic.Uint32)(unsafe.Pointer(&mem[pongAt])), nil
}

const (
	futexWaitOp = 0
	futexWakeOp = 1
)

// raise moves a word on and wakes its waiter.
func raise(w *atomic.Uint32) {
	w.Add(1)
	_, _, _ = unix.RawSyscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(w)), futexWakeOp, 1, 0, 0, 0)
}

// await parks until the word differs from old. Raw calls bypass the Go scheduler, so the
// figure is the kernel's. They are safe because these processes do not collect garbage.
func await(w *atomic.Uint32, old uint32) {
	for w.Load() == old {
		_, _, _ = unix.RawSyscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(w)), futexWaitOp, uintptr(old), 0, 0, 0)
	}
}

func futexPingRole(c *testbed.Child) error {
	ping, pong, err := mapWords()
	if err != nil {
		return err
	}
	return futexRole(c, 0, func(ns []int64) {
		for i := range ns {
			old := pong.Load()
			start := shm.Now()
			raise(ping)
			await(pong, old)
			ns[i] = shm.Now() - start
		}
	})
}

func futexPongRole(c *testbed.Child) error {
	ping, pong, err := mapWords()
	if err != nil {
		return err
	}
	seen := ping.Load()
	return futexRole(c, 1, func(ns []int64) {
		for range ns {
			await(ping, seen)
			seen++
			raise(pong)
		}
	})
}

func futexRole(c *testbed.Child, core int, run func([]int64)) error {
	debug.SetGCPercent(-1)
	runtime.LockOSThread()
	if err := pinTo(core); err != nil {
		return err
	}
	return testbed.Serve(c, func(trips int) (int64, error) {
		ns := make([]int64, trips)
		run(ns)
		slices.Sort(ns)
		return ns[len(ns)/2], nil
	})
}

// pinTo pins this thread to the n-th core of the process, or to its last.
func pinTo(n int) error {
	var may, want unix.CPUSet
	if err := unix.SchedGetaffinity(0, &may); err != nil {
		return fmt.Errorf("cores of this process: %w", err)
	}
	n = min(n, may.Count()-1)
	for cpu := 0; ; cpu++ {
		if may.IsSet(cpu) {
			if n == 0 {
				want.Set(cpu)
				return unix.SchedSetaffinity(0, &want)
			}
			n--
		}
	}
}
