// SPDX-License-Identifier: Apache-2.0

// Package sdnotify reports the state of a service to the service manager (sd_notify(3)):
// one datagram of lines to the socket $NOTIFY_SOCKET. Without it, the functions do nothing.
package sdnotify

import (
	"context"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Notifier reaches the service manager. It is nil if there is none.
type Notifier struct {
	addr     *net.UnixAddr
	watchdog time.Duration // interval of the manager's watchdog; 0: none
}

// FromEnvironment reads the service manager's variables and removes them from the
// environment, so that child processes do not notify for this process.
func FromEnvironment() *Notifier {
	defer func() {
		for _, name := range []string{"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"} {
			_ = os.Unsetenv(name)
		}
	}()
	path := os.Getenv("NOTIFY_SOCKET")
	if !strings.HasPrefix(path, "/") && !strings.HasPrefix(path, "@") {
		return nil
	}
	n := &Notifier{addr: &net.UnixAddr{Name: path, Net: "unixgram"}}
	if pid := os.Getenv("WATCHDOG_PID"); pid == "" || pid == strconv.Itoa(os.Getpid()) {
		if us, err := strconv.ParseInt(os.Getenv("WATCHDOG_USEC"), 10, 64); err == nil && us > 0 {
			n.watchdog = time.Duration(us) * time.Microsecond
		}
	}
	return n
}

func (n *Notifier) send(lines ...string) {
	if n == nil {
		return
	}
	c, err := net.DialUnix("unixgram", nil, n.addr)
	if err != nil {
		return // no service manager listens
	}
	defer c.Close()
	_ = c.SetWriteDeadline(time.Now().Add(time.Second))
	_, _ = c.Write([]byte(strings.Join(lines, "\n")))
}

// Ready reports that the service is up, with a text about it.
func (n *Notifier) Ready(status string) { n.send("READY=1", "STATUS="+status) }

// Reloading reports that the service reads its configuration again. Ready follows.
func (n *Notifier) Reloading() {
	var now unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &now)
	n.send("RELOADING=1", fmt.Sprintf("MONOTONIC_USEC=%d", now.Nano()/1000))
}

// Stopping reports that the service is about to end.
func (n *Notifier) Stopping() { n.send("STOPPING=1") }

// Watchdog reports, twice per interval of the manager's watchdog, that the service is
// alive, as long as calls of alive return. It returns when ctx ends, or at once if the
// manager has no watchdog.
func (n *Notifier) Watchdog(ctx context.Context, alive func()) {
	if n == nil || n.watchdog <= 0 {
		return
	}
	t := time.NewTicker(n.watchdog / 2)
	defer t.Stop()
	for {
		alive()
		n.send("WATCHDOG=1")
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
	}
}
