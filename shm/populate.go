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

// Range is some bytes of a segment.
type Range struct{ Offset, Length int64 }

// Populate makes the kernel back the ranges with memory now, so that a
// refusal is an error here and not a SIGBUS later, and so that no page fault
// hits the first request.
//
// Of a memory cgroup's limit the kernel gives no notice: it kills. So what is
// missing is compared with what the process's groups leave it, before any
// page is touched: those that are would stay, charged to the group, for as
// long as the ring lives.
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

// CheckRoom says whether the memory cgroups of this process leave it so many
// bytes, and what the kernel needs beside them to keep track of them.
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

// pages are the kernel's pages that hold a range.
func (s *Segment) pages(r Range) []byte {
	from, to := wholePages(r, int64(os.Getpagesize()), int64(len(s.mem)))
	return s.mem[from:to]
}

// wholePages widens a range of a segment to whole pages of the kernel. These may be larger
// than the layout's: 64 KiB on some arm64 machines.
func wholePages(r Range, page, size int64) (from, to int64) {
	return r.Offset &^ (page - 1), min(roundUp(r.Offset+r.Length, page), size)
}

// missingBytes is how much of mem the kernel has not backed yet. Where it
// does not tell, nothing is missing.
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
