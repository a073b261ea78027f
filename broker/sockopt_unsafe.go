// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"errors"
	"unsafe"

	"golang.org/x/sys/unix"
)

// getsockopt reads an option of any length; nil if there is none.
func getsockopt(fd, level, name int) []byte {
	for n := uint32(256); ; {
		buf := make([]byte, n)
		_, _, err := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), uintptr(level), uintptr(name),
			uintptr(unsafe.Pointer(&buf[0])), uintptr(unsafe.Pointer(&n)), 0)
		switch {
		case err == 0:
			return buf[:n]
		case !errors.Is(err, unix.ERANGE) || int(n) <= len(buf):
			return nil
		}
	}
}
