// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"errors"
	"fmt"
	"sync"

	"github.com/ringbatch/ringbatch/status"
	"golang.org/x/sys/unix"
)

// seals are set on every segment before its descriptor leaves the broker, so that no peer
// can shrink it while others use it (SIGBUS), or unseal it.
const seals = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL

// Access is how a peer maps a segment.
type Access uint8

const (
	ReadOnly Access = iota
	ReadWrite
)

// Segment is a mapped segment of shared memory.
type Segment struct {
	mem    []byte
	fd     int // -1 after CloseFD or TakeFD
	mapped bool
	heap   *heap // nil: not of CreateOnHeap
	once   sync.Once
}

// Bytes is the whole mapping.
func (s *Segment) Bytes() []byte { return s.mem }

// Size is the length of the mapping.
func (s *Segment) Size() int64 { return int64(len(s.mem)) }

// FD is the segment's descriptor, to be sent to a peer, or -1.
func (s *Segment) FD() int { return s.fd }

// ReadOnlyFD opens a second descriptor that cannot be mapped for writing. The caller
// closes it. It is -1 if the segment has no descriptor.
func (s *Segment) ReadOnlyFD() (int, error) {
	if s.fd < 0 {
		return -1, nil
	}
	fd, err := unix.Open(fmt.Sprintf("/proc/self/fd/%d", s.fd), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("reopen segment read-only through /proc, which must be mounted: %w", err)
	}
	return fd, nil
}

// TakeFD hands the descriptor to the caller and keeps the mapping.
func (s *Segment) TakeFD() int {
	fd := s.fd
	s.fd = -1
	return fd
}

// CloseFD closes the descriptor and keeps the mapping.
func (s *Segment) CloseFD() {
	if s.fd >= 0 {
		_ = unix.Close(s.fd)
		s.fd = -1
	}
}

// Close unmaps the segment. Views into it must not be used any more.
func (s *Segment) Close() {
	s.once.Do(func() {
		s.CloseFD()
		if s.mapped {
			_ = unix.Munmap(s.mem)
		}
		s.mem = nil
	})
}

// OutOfDescriptors reports whether a system call failed because the process or the
// machine has no file descriptor left.
func OutOfDescriptors(err error) bool {
	return errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE)
}

// Create makes a segment and maps it for reading and writing. It is anonymous, sealed
// shared memory that disappears with its last user.
func Create(name string, size int64) (*Segment, error) {
	fd, err := unix.MemfdCreate("ringbatch-"+name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		code := status.ErrNoMemory
		if OutOfDescriptors(err) {
			code = status.ErrNoDescriptors
		}
		return nil, fmt.Errorf("%w: memfd_create: %v", code, err)
	}
	if err := unix.Ftruncate(fd, size); err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("%w: size segment %s to %d MiB: %v", status.ErrNoMemory, name, size>>20, err)
	}
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals); err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("seal segment %s: %w", name, err)
	}
	// A peer of another user with a read-only descriptor must not be able to open it
	// again for writing.
	if err := unix.Fchmod(fd, 0o400); err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("protect segment %s: %w", name, err)
	}
	return Open(fd, size, ReadWrite)
}

// Open maps a segment of the broker, after it has checked seals and size. It takes
// ownership of fd.
func Open(fd int, size int64, access Access) (*Segment, error) {
	if err := checkSegmentFD(fd, size); err != nil {
		_ = unix.Close(fd)
		return nil, err
	}
	if s := openHeap(fd); s != nil {
		return s, nil
	}
	prot := unix.PROT_READ
	if access == ReadWrite {
		prot |= unix.PROT_WRITE
	}
	mem, err := unix.Mmap(fd, 0, int(size), prot, unix.MAP_SHARED)
	if err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("%w: map %d MiB: %v", status.ErrNoMemory, size>>20, err)
	}
	// A forked child must not write into slots of its parent: it connects again.
	_ = unix.Madvise(mem, unix.MADV_DONTFORK)
	return &Segment{mem: mem, fd: fd, mapped: true}, nil
}

func checkSegmentFD(fd int, size int64) error {
	set, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	if err != nil || set&seals != seals {
		return fmt.Errorf("%w: segment is not a sealed memfd", status.ErrLayout)
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return fmt.Errorf("stat segment: %w", err)
	}
	if st.Size != size || size < segmentHeader {
		return fmt.Errorf("%w: segment has %d bytes, expected %d", status.ErrLayout, st.Size, size)
	}
	return nil
}
