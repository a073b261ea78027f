// SPDX-License-Identifier: Apache-2.0

package attach

import (
	"context"
	"errors"
	"io"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/internal/control"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/status"
)

// A broker that many connect to at once has a full queue for a moment. It is there
// anyway: a client that connects waits.
func TestDialWaitsForAPlaceInTheQueue(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	l := newSocket(t)
	must.Do(t, errors.Join(unix.Bind(l, &unix.SockaddrUnix{Name: socket}), unix.Listen(l, 1)))
	for {
		c := newSocket(t)
		err := unix.Connect(c, &unix.SockaddrUnix{Name: socket})
		if errors.Is(err, unix.EAGAIN) {
			break
		}
		must.Do(t, err)
	}
	for range 10 {
		if _, err := dial(t.Context(), socket, 5*time.Millisecond); !errors.Is(err, unix.EAGAIN) {
			t.Errorf("with a full queue, and a caller that would wait for longer: %v", err)
		}
	}
	for timeout := 10 * time.Millisecond; ; timeout *= 2 { // it may be over before the first try
		ctx, cancel := context.WithTimeout(t.Context(), timeout)
		_, err := Dial(ctx, socket)
		cancel()
		if !errors.Is(err, context.DeadlineExceeded) || errors.Is(err, status.ErrNoBroker) || timeout > time.Minute {
			t.Fatalf("with a full queue, for %v: %v", timeout, err)
		}
		if strings.Contains(err.Error(), socket) {
			break
		}
	}
	time.AfterFunc(10*time.Millisecond, func() { _, _, _ = unix.Accept(l) })
	c, err := Dial(t.Context(), socket)
	must.Do(t, err)
	_ = c.Close()
}

func newSocket(t *testing.T) int {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	must.Do(t, err)
	t.Cleanup(func() { _ = unix.Close(fd) })
	return fd
}

// A forked child may keep the descriptor. A caller that gives up ends the connection for the child, too.
func TestACallThatIsGivenUpEndsTheConnectionForEverybodyWhoHasIt(t *testing.T) {
	l, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
	must.Do(t, err)
	defer l.Close()
	c, err := Dial(t.Context(), l.Addr().String())
	must.Do(t, err)
	kept, err := c.File() // as the child has it
	must.Do(t, err)
	defer kept.Close()
	broker, err := l.Accept()
	must.Do(t, err)
	defer broker.Close()
	ctx, giveUp := context.WithCancel(t.Context())
	called := make(chan error, 1)
	go func() { _, _, err := Call(ctx, c, &control.Request{Op: control.OpWatch}); called <- err }()
	_, err = broker.Read(make([]byte, 1))
	must.Do(t, err)
	giveUp()
	must.Fail(t, "the call", <-called, context.Canceled)
	_, err = io.Copy(io.Discard, broker) // to its end
	must.Check(t, err)
}
