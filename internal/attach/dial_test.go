// SPDX-License-Identifier: Apache-2.0

package attach

import (
	"context"
	"errors"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/status"
)

// A broker that many connect to at once has a full queue for a moment. It is there
// all the same: who connects waits.
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
