// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// rawRead and rawWrite are the system calls without the Go scheduler's
// bookkeeping around them.
func rawRead(fd int, b []byte) (int, error) { return rawIO(unix.SYS_READ, fd, b) }

func rawWrite(fd int, b []byte) (int, error) { return rawIO(unix.SYS_WRITE, fd, b) }

func rawIO(call uintptr, fd int, b []byte) (int, error) {
	n, _, e := unix.RawSyscall(call, uintptr(fd), uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)))
	if e != 0 {
		return 0, e
	}
	return int(n), nil
}
