// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"fmt"
	"os"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// All unsafe code of this package: typed views of mapped bytes, and futex calls.

// The build fails if the size of a struct drifts from the protocol: the index is then
// not 0.
var (
	_ = [1]int{}[unsafe.Sizeof(header{})-64]
	_ = [1]int{}[unsafe.Sizeof(Commit{})-64]
	_ = [1]int{}[unsafe.Sizeof(Mail{})-64]
	_ = [1]int{}[unsafe.Sizeof(MailRequest{})-64]
	_ = [1]int{}[unsafe.Sizeof(Done{})-32]
	_ = [1]int{}[unsafe.Sizeof(Record{})-64]
	_ = [1]int{}[unsafe.Sizeof(ringWords{})-128]
	_ = [1]int{}[unsafe.Sizeof(mailWords{})-192]
	_ = [1]int{}[unsafe.Sizeof(Times{})-64]
	_ = [1]int{}[unsafe.Sizeof(recordWords{})-64]
	_ = [1]int{}[unsafe.Sizeof(Bell{})-64]
	_ = [1]int{}[unsafe.Sizeof(weightWords{})-64]
	_ = [1]int{}[unsafe.Sizeof(followerWords{})-64]
)

// at views the bytes at off as a T. It panics if off is misaligned or outside of mem.
func at[T any](mem []byte, off int64) *T {
	var z T
	size := int64(unsafe.Sizeof(z))
	if off < 0 || off+size > int64(len(mem)) || off%int64(unsafe.Alignof(z)) != 0 {
		panic(fmt.Sprintf("shm: view of %d bytes at %d of %d", size, off, len(mem)))
	}
	return (*T)(unsafe.Pointer(&mem[off]))
}

// array views n consecutive Ts.
func array[T any](mem []byte, off int64, n int) []T {
	var z T
	size := int64(unsafe.Sizeof(z))
	if off < 0 || n < 1 || off+size*int64(n) > int64(len(mem)) || off%int64(unsafe.Alignof(z)) != 0 {
		panic(fmt.Sprintf("shm: view of %d × %d bytes at %d of %d", n, size, off, len(mem)))
	}
	return unsafe.Slice((*T)(unsafe.Pointer(&mem[off])), n)
}

// alignedHeap is page-aligned memory of the Go heap.
func alignedHeap(size int64) []byte {
	b := make([]byte, size+pageSize)
	skip := pageSize - int64(uintptr(unsafe.Pointer(&b[0]))%pageSize)
	return b[skip : skip+size : skip+size]
}

const (
	futexWait = 0
	futexWake = 1
)

// futexWaitFor parks the calling thread until the word differs from old or d has passed.
// raw goes past the Go scheduler (see Parker).
func futexWaitFor(word *uint32, old uint32, d time.Duration, raw bool) {
	ts := unix.NsecToTimespec(int64(d))
	if raw {
		_, _, _ = unix.RawSyscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(word)), futexWait, uintptr(old),
			uintptr(unsafe.Pointer(&ts)), 0, 0)
	} else {
		_, _, _ = unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(word)), futexWait, uintptr(old),
			uintptr(unsafe.Pointer(&ts)), 0, 0)
	}
}

// futexWakeOne wakes one waiter. It never blocks, so it need not inform the scheduler.
func futexWakeOne(word *uint32) { futexWakeUp(word, 1) }

// futexWakeUp wakes at most n waiters.
func futexWakeUp(word *uint32, n uintptr) {
	_, _, _ = unix.RawSyscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(word)), futexWake, n, 0, 0, 0)
}

func wordOf(a *atomic.Uint32) *uint32 { return (*uint32)(unsafe.Pointer(a)) }

// residentPages has a byte per page of mem; bit 0 is set if the kernel has backed the
// page. If the file belongs to another user, the kernel reports all pages as backed.
func residentPages(mem []byte) ([]byte, error) {
	page := os.Getpagesize()
	pages := make([]byte, (len(mem)+page-1)/page)
	if _, _, e := unix.Syscall(unix.SYS_MINCORE, uintptr(unsafe.Pointer(&mem[0])), uintptr(len(mem)),
		uintptr(unsafe.Pointer(&pages[0]))); e != 0 {
		return nil, fmt.Errorf("mincore: %w", e)
	}
	return pages, nil
}

// AddressOf is the address of an offset in this process, for example to pin the segment
// for a GPU or to pass pointers to C.
func (s *Segment) AddressOf(off int64) unsafe.Pointer { return unsafe.Pointer(&s.mem[off]) }
