// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"sync"
	"sync/atomic"
	"weak"

	"golang.org/x/sys/unix"
)

// heap is a segment on the Go heap of one process, for tests: there the race detector
// sees broker, clients and workers. A memfd without data is its identity.
type heap struct{ mem []byte }

var (
	heaps      sync.Map // weak pointers by inode
	heapsExist atomic.Bool
)

// CreateOnHeap is Create for tests whose peers all live in this process.
func CreateOnHeap(name string, size int64) (*Segment, error) {
	s, err := Create(name, size)
	if err != nil {
		return nil, err
	}
	_ = unix.Munmap(s.mem)
	s.mem, s.mapped = alignedHeap(size), false
	s.heap = &heap{s.mem}
	heaps.Store(inode(s.fd), weak.Make(s.heap))
	heapsExist.Store(true)
	return s, nil
}

// CreateUnshared is Create for simulations: heap bytes that no peer can open. A
// simulation makes dozens of segments, and a memfd costs eleven system calls.
func CreateUnshared(_ string, size int64) (*Segment, error) {
	return &Segment{mem: alignedHeap(size), fd: -1}, nil
}

// openHeap returns nil if the descriptor is not of CreateOnHeap.
func openHeap(fd int) *Segment {
	if !heapsExist.Load() {
		return nil
	}
	p, ok := heaps.Load(inode(fd))
	if !ok {
		return nil
	}
	if h := p.(weak.Pointer[heap]).Value(); h != nil {
		return &Segment{mem: h.mem, fd: fd, heap: h}
	}
	return nil
}

func inode(fd int) uint64 {
	var st unix.Stat_t
	_ = unix.Fstat(fd, &st) // the seals of fd were read before
	return st.Ino
}
