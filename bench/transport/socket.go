// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"fmt"
	"io"
	"os"
	"runtime"
	"runtime/debug"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/internal/cputime"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/test/testbed"
	"github.com/ringbatch/ringbatch/tools/load"
)

// The same exchange as one message each way over a Unix socket, SOCK_STREAM or SOCK_SEQPACKET, with blocking system calls and a
// thread per connection; the faster is the yardstick. The server is one process; each connection is one end of a socketpair
// that both sides get as descriptors 3, 4 …

// messageBytes is the size of a message each way.
const messageBytes = 64

type socketJob struct {
	Conns int // server: descriptors 3 … 3+Conns-1
}

type socketOrder struct {
	InFlight int
	Start    int64
	Until    int64
}

// rawSocket blocks in the kernel, past the Go scheduler, as a C program does. The process
// has as many Ps as connections, and no garbage.
type rawSocket int

func (s rawSocket) read(b []byte) error  { return s.transfer(unix.SYS_READ, b) }
func (s rawSocket) write(b []byte) error { return s.transfer(unix.SYS_WRITE, b) }

// transfer makes the system call, without the Go scheduler's bookkeeping, until the whole message has passed.
func (s rawSocket) transfer(call uintptr, b []byte) error {
	for len(b) > 0 {
		n, _, e := unix.RawSyscall(call, uintptr(s), uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)))
		switch {
		case e == unix.EINTR:
		case e != 0:
			return e
		case n == 0:
			return io.EOF
		default:
			b = b[n:]
		}
	}
	return nil
}

func socketServerRole(c *testbed.Child, job socketJob) error {
	debug.SetGCPercent(-1)
	var wg sync.WaitGroup
	for i := range job.Conns {
		s := rawSocket(3 + i)
		wg.Go(func() {
			runtime.LockOSThread()
			msg := make([]byte, messageBytes)
			for s.read(msg) == nil && s.write(msg) == nil {
			}
		})
	}
	if err := c.Ready(); err != nil {
		return err
	}
	wg.Wait()
	return nil
}

func socketClientRole(c *testbed.Child) error {
	debug.SetGCPercent(-1)
	s := rawSocket(3)
	return testbed.Serve(c, func(o socketOrder) (r outcome, err error) {
		before, err := cputime.Of(os.Getpid())
		if err != nil {
			return r, err
		}
		if r.Requests, err = socketStream(s, o); err != nil {
			return r, err
		}
		after, err := cputime.Of(os.Getpid())
		r.CPU = int64(after - before)
		return r, err
	})
}

// socketStream is transport.stream over a socket.
func socketStream(s rawSocket, o socketOrder) (answered int, err error) {
	request, reply := make([]byte, messageBytes), make([]byte, messageBytes)
	for i := range request {
		request[i] = byte(i)
	}
	load.SleepUntil(o.Start)
	under := 0
	for now := shm.Now(); ; now = shm.Now() {
		if now < o.Until && under < o.InFlight {
			if err := s.write(request); err != nil {
				return 0, err
			}
			under++
			continue
		}
		if under == 0 {
			return answered, nil
		}
		if err := s.read(reply); err != nil {
			return 0, err
		}
		if reply[messageBytes-1] != messageBytes-1 {
			return 0, fmt.Errorf("wrong answer")
		}
		under--
		if now < o.Until {
			answered++
		}
	}
}
