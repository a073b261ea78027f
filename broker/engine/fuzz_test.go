// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"encoding/binary"
	"testing"

	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/shm"
)

// FuzzCommit lets a client commit any bytes: it is served or thrown out, and leaves
// nothing behind.
func FuzzCommit(f *testing.F) {
	entry := func(kind, level byte, rows, slot, gen uint32) []byte {
		b := make([]byte, 64)
		b[0], b[1] = kind, level
		binary.NativeEndian.PutUint32(b[4:], rows)
		binary.NativeEndian.PutUint32(b[8:], slot)
		binary.NativeEndian.PutUint32(b[12:], gen)
		return b
	}
	f.Add(entry(1, 0xff, 1, 0, 1))
	f.Add(append(entry(1, 0xff, 2, 0, 1), entry(2, 0, 2, 0, 1)...))
	f.Add(append(entry(1, 0, 1, 1, 1), entry(1, 0, 1, 1, 2)...))
	f.Add(entry(1, 0xff, 0xffffffff, 1, 1))
	f.Add(entry(2, 0, 0, 3, 0xffffffff))
	f.Add(entry(9, 1, 2, 3, 4))
	f.Fuzz(func(t *testing.T, data []byte) {
		s := newWorld(t, 1)
		s.dynamic = false
		c, err := s.attach("fuzz", 4)
		must.Do(t, err)
		ring := shm.Producer[shm.Commit]{Ring: shm.CommitRing(c.seg, 4)}
		for len(data) >= 64 && c.isAttached() {
			e := shm.Commit{
				Kind: shm.CommitKind(data[0]), Level: int8(data[1]), Cost: binary.NativeEndian.Uint16(data[2:]),
				Rows: binary.NativeEndian.Uint32(data[4:]), Slot: binary.NativeEndian.Uint32(data[8:]),
				Gen: binary.NativeEndian.Uint32(data[12:]), Deadline: int64(binary.NativeEndian.Uint64(data[16:])),
				Committed: int64(binary.NativeEndian.Uint64(data[24:])),
			}
			for i := range e.Dims {
				e.Dims[i] = binary.NativeEndian.Uint32(data[32+4*i:])
			}
			ring.Push(&e)
			data = data[64:]
			s.r.clientRang(c)
			s.l.settleRound()
		}
		s.r.clientLeft(c, "fuzz")
		s.l.settleRound()
		s.books()
	})
}
