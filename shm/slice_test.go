// SPDX-License-Identifier: Apache-2.0

package shm_test

import (
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/shm"
)

func sliceOfThread(t *testing.T) uint64 {
	t.Helper()
	attr, err := unix.SchedGetAttr(0, 0)
	must.Do(t, err)
	return attr.Runtime
}

func TestAThreadGetsAShortSliceAndGivesItBack(t *testing.T) {
	if !shm.ShortSliceWorks() {
		t.Skip("this kernel has no slices of a thread's own")
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	before := sliceOfThread(t)
	undo := shm.AskShortSlice()
	if got := sliceOfThread(t); got != uint64(100*time.Microsecond) {
		t.Errorf("slice is %d ns, want %d", got, 100*time.Microsecond)
	}
	undo()
	if got := sliceOfThread(t); got != before {
		t.Errorf("slice afterwards is %d ns, was %d", got, before)
	}
}

func TestTheVariableSwitchesShortSlicesOff(t *testing.T) {
	t.Setenv(shm.SliceVariable, "off")
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	before := sliceOfThread(t)
	defer shm.AskShortSlice()()
	if got := sliceOfThread(t); got != before {
		t.Errorf("slice is %d ns, was %d", got, before)
	}
}
