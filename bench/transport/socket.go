// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"runtime/debug"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/bench/rig"
	"github.com/ringbatch/ringbatch/internal/testbed"
	"github.com/ringbatch/ringbatch/shm"
)

// The same exchange as one message each way over a Unix socket, written in
// the ways that a careful author would try; the fastest is the yardstick.
//
//	stream     blocking system calls, a thread per connection, SOCK_STREAM
//	seqpacket  the same with SOCK_SEQPACKET
//	net        package net, a goroutine per connection
//
// The server is one process; each connection is one end of a socketpair that
// both sides were given as descriptors 3, 4 …

// messageBytes is the size of a message each way.
const messageBytes = 64

type socketJob struct {
	Kind  string
	Conns int // server: descriptors 3 … 3+Conns-1
}

type socketOrder struct {
	InFlight int
	Start    int64
	Until    int64
}

// duplex is one end of a connection: whole messages in and out.
type duplex interface {
	read([]byte) error
	write([]byte) error
}

func openSocket(kind string, fd int) (duplex, error) {
	if kind != "net" {
		return rawSocket(fd), nil
	}
	f := os.NewFile(uintptr(fd), "socket")
	defer f.Close()
	c, err := net.FileConn(f)
	if err != nil {
		return nil, err
	}
	return netSocket{c}, nil
}

// rawSocket blocks in the kernel, past the Go scheduler: what a C program
// would do. The process has as many Ps as connections, and no garbage.
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

type netSocket struct{ net.Conn }

func (s netSocket) read(b []byte) error  { _, err := io.ReadFull(s.Conn, b); return err }
func (s netSocket) write(b []byte) error { _, err := s.Conn.Write(b); return err }

func socketServerRole(c *testbed.Child, job socketJob) error {
	debug.SetGCPercent(-1)
	var wg sync.WaitGroup
	for i := range job.Conns {
		s, err := openSocket(job.Kind, 3+i)
		if err != nil {
			return err
		}
		wg.Go(func() {
			if job.Kind != "net" {
				runtime.LockOSThread()
			}
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

func socketClientRole(c *testbed.Child, job socketJob) error {
	debug.SetGCPercent(-1)
	s, err := openSocket(job.Kind, 3)
	if err != nil {
		return err
	}
	return testbed.Serve(c, func(o socketOrder) (r outcome, err error) {
		before, err := testbed.CPUTime(os.Getpid())
		if err != nil {
			return r, err
		}
		if r.Requests, err = socketStream(s, o); err != nil {
			return r, err
		}
		after, err := testbed.CPUTime(os.Getpid())
		r.CPU = int64(after - before)
		return r, err
	})
}

// socketStream is transport.stream over a socket.
func socketStream(s duplex, o socketOrder) (answered int, err error) {
	request, reply := make([]byte, messageBytes), make([]byte, messageBytes)
	for i := range request {
		request[i] = byte(i)
	}
	rig.SleepUntil(o.Start)
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
