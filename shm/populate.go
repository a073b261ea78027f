// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/internal/cgroup"
	"github.com/ringbatch/ringbatch/status"
)

// Range is a range of bytes of a segment.
type Range struct{ Offset, Length int64 }

// Populate makes the kernel back the ranges with memory now. A refusal is an error here
// and not a SIGBUS later, and no page fault delays the first request.
//
// At a memory cgroup's limit the kernel does not refuse: it kills. So Populate compares
// the missing bytes with the room in the process's cgroups before it touches a page.
// Touched pages would stay charged to the group for as long as the ring lives.
func (s *Segment) Populate(ranges ...Range) error {
	if !s.mapped {
		return nil
	}
	var missing int64
	for _, r := range ranges {
		missing += missingBytes(s.pages(r))
	}
	if err := CheckRoom(missing); err != nil {
		return err
	}
	for _, r := range ranges {
		if err := populate(s.pages(r)); err != nil {
			return err
		}
	}
	return nil
}

// CheckRoom returns an error if the memory cgroups of this process have no room for that
// many bytes and the kernel's page tables.
func CheckRoom(bytes int64) error {
	if bytes <= 0 {
		return nil
	}
	room, limited := cgroup.Tightest()
	if limited && bytes+bytes/64 > room.Left {
		return fmt.Errorf("%w: %d MiB of shared memory, the memory cgroup %s has %d of %d MiB left",
			status.ErrNoMemory, mebibytes(bytes), room.Group, room.Left>>20, room.Limit>>20)
	}
	return nil
}

func mebibytes(bytes int64) int64 { return (bytes + 1<<20 - 1) >> 20 }

// pages is a range, widened to whole pages of the kernel.
func (s *Segment) pages(r Range) []byte {
	from, to := wholePages(r, int64(os.Getpagesize()), int64(len(s.mem)))
	return s.mem[from:to]
}

// wholePages widens a range to whole pages of the kernel, which may be larger than the
// layout's pages: 64 KiB on some arm64 machines.
func wholePages(r Range, page, size int64) (from, to int64) {
	return r.Offset &^ (page - 1), min(roundUp(r.Offset+r.Length, page), size)
}

// missingBytes is the part of mem that the kernel has not backed yet; 0 if unknown.
func missingBytes(mem []byte) (n int64) {
	if len(mem) == 0 {
		return 0
	}
	pages, err := residentPages(mem)
	if err != nil {
		return 0
	}
	for _, p := range pages {
		if p&1 == 0 {
			n += int64(os.Getpagesize())
		}
	}
	return n
}

func populate(mem []byte) error {
	if len(mem) == 0 {
		return nil
	}
	err := unix.Madvise(mem, unix.MADV_POPULATE_WRITE)
	if err != nil && !errors.Is(err, unix.EINVAL) { // kernels before 5.14 fault lazily
		return fmt.Errorf("%w: %d MiB of shared memory: %v", status.ErrNoMemory, mebibytes(int64(len(mem))), err)
	}
	return nil
}
