// SPDX-License-Identifier: Apache-2.0

package chaos

import (
	"encoding/binary"
	"math/rand/v2"
	"net"
	"time"
	"unsafe"

	"github.com/ringbatch/ringbatch/internal/attach"
	"github.com/ringbatch/ringbatch/shm"
	"golang.org/x/sys/unix"
)

// attacks return how many words they changed.
var attacks = []func(*attach.Session, *rand.Rand) int{scribbleAll, scribbleAll, scribbleEntries, wrongField, cancelFlood, punchHole,
	floodBell, stealWakes, scribbleWindow}

// scribbleAll writes random words over the whole session.
func scribbleAll(s *attach.Session, rng *rand.Rand) int {
	mem := s.Words.Bytes()
	const n = 1 << 16
	for range n {
		binary.NativeEndian.PutUint64(mem[rng.IntN(len(mem)/8)*8:], rng.Uint64()>>rng.IntN(64))
	}
	return n
}

// scribbleEntries writes random entries and moves the tail by a plausible number.
func scribbleEntries(s *attach.Session, rng *rand.Rand) int {
	mem := s.Words.Bytes()
	n := (len(mem) - 4096) / 8
	for i := range n {
		binary.NativeEndian.PutUint64(mem[4096+i*8:], rng.Uint64()>>rng.IntN(64))
	}
	binary.NativeEndian.PutUint64(mem[64:], uint64(rng.IntN(8)))
	return n + 1
}

// wrongField commits an entry with one wrong field.
func wrongField(s *attach.Session, rng *rand.Rand) int {
	ring := shm.Producer[shm.Commit]{Ring: shm.CommitRing(s.Words, s.Info.Window)}
	e := shm.Commit{Kind: shm.KindCommit, Level: -1, Rows: 1, Slot: s.Info.FirstSlot, Gen: s.Info.FirstGen + 1, Committed: shm.Now()}
	switch rng.IntN(7) {
	case 0:
		e.Slot += uint32(s.Info.Window)
	case 1:
		e.Rows = rng.Uint32()
	case 2:
		e.Gen = rng.Uint32()
	case 3:
		e.Dims[rng.IntN(len(e.Dims))] = rng.Uint32()
	case 4:
		e.Kind = shm.CommitKind(rng.Uint32())
	case 5:
		e.Level = int8(rng.Uint32())
	case 6:
		e.Deadline, e.Committed = -rng.Int64(), -rng.Int64()
	}
	ring.Push(&e)
	return 1
}

// cancelFlood sends cancels of no request, as fast as it can.
func cancelFlood(s *attach.Session, _ *rand.Rand) int {
	ring := shm.Producer[shm.Commit]{Ring: shm.CommitRing(s.Words, s.Info.Window)}
	n := 0
	for end := shm.Now() + int64(5*time.Millisecond); shm.Now() < end; n++ {
		if wake, _ := ring.Push(&shm.Commit{Kind: shm.KindCancel, Slot: s.Info.FirstSlot, Gen: s.Info.FirstGen}); wake {
			s.Doorbell.Ring()
		}
	}
	return n
}

// punchHole frees the pages of the session.
func punchHole(s *attach.Session, rng *rand.Rand) int {
	mem := s.Words.Bytes()
	_ = unix.Madvise(mem, unix.MADV_REMOVE)
	return scribbleAll(s, rng)
}

// floodBell overflows the doorbell and rings it a thousand times.
func floodBell(s *attach.Session, _ *rand.Rand) int {
	var most [8]byte
	binary.NativeEndian.PutUint64(most[:], 1<<64-2)
	_, _ = unix.Write(int(s.Doorbell), most[:])
	for range 1000 {
		var b [8]byte
		_, _ = unix.Read(int(s.Doorbell), b[:])
		s.Doorbell.Ring()
	}
	return 1000
}

// scribbleWindow overwrites its rows while a worker may read them.
func scribbleWindow(s *attach.Session, rng *rand.Rand) int {
	n := 0
	for _, planes := range [][]shm.Plane{s.Layout.Inputs, s.Layout.Outputs} {
		for i := range planes {
			rows := planes[i].Rows(s.Planes.Bytes(), s.Info.FirstSlot, s.Info.Window)
			for j := 0; j+8 <= len(rows); j += 8 {
				binary.NativeEndian.PutUint64(rows[j:], rng.Uint64())
				n++
			}
		}
	}
	return n
}

const futexRequeue = 3

// stealWakes moves the waiters of every bell to its own bell, which never rings.
func stealWakes(s *attach.Session, _ *rand.Rand) int {
	mine := unsafe.Pointer(&s.Board.Bell(s.Info.FirstSlot).Count)
	for slot := range uint32(s.Layout.Slots) {
		theirs := unsafe.Pointer(&s.Board.Bell(slot).Count)
		if theirs != mine {
			_, _, _ = unix.Syscall6(unix.SYS_FUTEX, uintptr(theirs), futexRequeue, 0, 1000, uintptr(mine), 0)
		}
	}
	time.Sleep(2 * time.Millisecond)
	return s.Layout.Slots
}

// speakNonsense sends malformed frames to the socket.
func speakNonsense(socket string, rng *rand.Rand) int {
	connections := 1
	if rng.IntN(10) == 0 {
		connections = 1000
	}
	var all []net.Conn
	for range connections {
		c, err := net.Dial("unix", socket)
		if err != nil {
			break
		}
		all = append(all, c)
		var frame [64]byte
		for i := range frame {
			frame[i] = byte(rng.Uint32())
		}
		switch rng.IntN(5) {
		case 0: // half a message
			binary.LittleEndian.PutUint32(frame[:], 1000)
		case 1: // a giant length
			binary.LittleEndian.PutUint32(frame[:], 1<<31)
		case 2, 3: // four thousand million elements
			binary.LittleEndian.PutUint32(frame[:], 60)
			copy(frame[4:], "\x81\xa6policy\x81\xa6levels\xdd\xff\xff\xff\xff")
		}
		_ = c.SetWriteDeadline(time.Now().Add(10 * time.Millisecond))
		_, _ = c.Write(frame[:64-rng.IntN(2)*rng.IntN(60)])
	}
	for _, c := range all {
		_ = c.Close()
	}
	return len(all)
}
