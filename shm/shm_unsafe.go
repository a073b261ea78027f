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

// Everything unsafe of this package: typed views of mapped bytes, and the
// futex calls that take their address.

// Compile-time pins: the build fails if a struct drifts from the protocol.
const (
	_ = uint(unsafe.Sizeof(header{}) - 64)
	_ = uint(64 - unsafe.Sizeof(header{}))
	_ = uint(unsafe.Sizeof(Commit{}) - 64)
	_ = uint(64 - unsafe.Sizeof(Commit{}))
	_ = uint(unsafe.Sizeof(Mail{}) - 64)
	_ = uint(64 - unsafe.Sizeof(Mail{}))
	_ = uint(unsafe.Sizeof(MailRequest{}) - 64)
	_ = uint(64 - unsafe.Sizeof(MailRequest{}))
	_ = uint(unsafe.Sizeof(Done{}) - 32)
	_ = uint(32 - unsafe.Sizeof(Done{}))
	_ = uint(unsafe.Sizeof(Record{}) - 64)
	_ = uint(64 - unsafe.Sizeof(Record{}))
	_ = uint(unsafe.Sizeof(ringWords{}) - 128)
	_ = uint(128 - unsafe.Sizeof(ringWords{}))
	_ = uint(unsafe.Sizeof(mailWords{}) - 192)
	_ = uint(192 - unsafe.Sizeof(mailWords{}))
	_ = uint(unsafe.Sizeof(Times{}) - 64)
	_ = uint(64 - unsafe.Sizeof(Times{}))
	_ = uint(unsafe.Sizeof(recordWords{}) - 64)
	_ = uint(64 - unsafe.Sizeof(recordWords{}))
	_ = uint(unsafe.Sizeof(Bell{}) - 64)
	_ = uint(64 - unsafe.Sizeof(Bell{}))
)

// at views the bytes at off as a T. The layouts keep every offset aligned;
// a misaligned or outlying one is our own bug, so it panics.
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

// alignedHeap is page-aligned heap memory, for segments under the race
// detector.
func alignedHeap(size int64) []byte {
	b := make([]byte, size+pageSize)
	skip := pageSize - int64(uintptr(unsafe.Pointer(&b[0]))%pageSize)
	return b[skip : skip+size : skip+size]
}

const (
	futexWait = 0
	futexWake = 1
)

// futexWaitFor parks the calling thread until the word changes from old or d
// has passed. raw goes past the Go scheduler (see Parker).
func futexWaitFor(word *uint32, old uint32, d time.Duration, raw bool) {
	ts := unix.NsecToTimespec(int64(d))
	if raw {
		_, _, _ = unix.RawSyscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(word)), futexWait, uintptr(old), uintptr(unsafe.Pointer(&ts)), 0, 0)
	} else {
		_, _, _ = unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(word)), futexWait, uintptr(old), uintptr(unsafe.Pointer(&ts)), 0, 0)
	}
}

// futexWakeOne wakes the one waiter a word may have. It never blocks, so it
// can do without the scheduler's bookkeeping.
func futexWakeOne(word *uint32) { futexWakeUp(word, 1) }

// futexWakeUp wakes at most n.
func futexWakeUp(word *uint32, n uintptr) {
	_, _, _ = unix.RawSyscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(word)), futexWake, n, 0, 0, 0)
}

func wordOf(a *atomic.Uint32) *uint32 { return (*uint32)(unsafe.Pointer(a)) }

// residentPages reports, one byte per page, in bit 0, which pages of mem the
// kernel has. Of a file that belongs to another user it says all.
func residentPages(mem []byte) ([]byte, error) {
	page := os.Getpagesize()
	pages := make([]byte, (len(mem)+page-1)/page)
	if _, _, e := unix.Syscall(unix.SYS_MINCORE, uintptr(unsafe.Pointer(&mem[0])), uintptr(len(mem)), uintptr(unsafe.Pointer(&pages[0]))); e != 0 {
		return nil, fmt.Errorf("mincore: %w", e)
	}
	return pages, nil
}

// AddressOf is where a segment is mapped in this process, for those who pin
// it for a GPU or hand pointers to C.
func (s *Segment) AddressOf(off int64) unsafe.Pointer { return unsafe.Pointer(&s.mem[off]) }
