// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"encoding/binary"
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Denial is a system call that a seccomp filter refuses, as a container's profile or an
// older kernel does.
type Denial struct {
	Call   uintptr
	Option uint32 // only where its third argument is this; 0: always
	Errno  unix.Errno
}

// Of struct seccomp_data.
const (
	seccompNumber   = 0
	seccompArgument = 16 // the first; low half first
)

// deny installs the filter, for all threads.
func deny(all []Denial) error {
	if len(all) == 0 {
		return nil
	}
	load := func(at uint32) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: at}
	}
	skipUnless := func(value uint32, n uint8) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jf: n, K: value}
	}
	answer := func(value uint32) unix.SockFilter { return unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: value} }
	var program []unix.SockFilter
	for _, d := range all {
		body := []unix.SockFilter{answer(unix.SECCOMP_RET_ERRNO | uint32(d.Errno))}
		if d.Option != 0 {
			third := uint32(seccompArgument + 2*8)
			if binary.NativeEndian.Uint16([]byte{0, 1}) == 1 { // big-endian
				third += 4
			}
			body = append([]unix.SockFilter{load(third), skipUnless(d.Option, 1)}, body...)
		}
		program = append(program, load(seccompNumber), skipUnless(uint32(d.Call), uint8(len(body))))
		program = append(program, body...)
	}
	program = append(program, answer(unix.SECCOMP_RET_ALLOW))
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("no new privileges: %w", err)
	}
	filter := unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]}
	_, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_TSYNC,
		uintptr(unsafe.Pointer(&filter)))
	if errno != 0 {
		return fmt.Errorf("seccomp: %w", errno)
	}
	return nil
}
