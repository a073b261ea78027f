// SPDX-License-Identifier: Apache-2.0

// Package sdnotify tells a service manager how a service is (sd_notify(3)): one
// datagram of lines to the socket that $NOTIFY_SOCKET names. Without one, all
// of it does nothing.
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

// Notifier is how to reach the service manager. nil if there is none.
type Notifier struct {
	addr     *net.UnixAddr
	watchdog time.Duration // how often it wants to hear of us; 0: it does not ask
}

// FromEnvironment reads what the service manager left, and takes it out of the
// environment: processes that this one starts must not speak for it.
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
		return // nobody to tell it to
	}
	defer c.Close()
	_ = c.SetWriteDeadline(time.Now().Add(time.Second))
	_, _ = c.Write([]byte(strings.Join(lines, "\n")))
}

// Ready says that the service is up, and what it does.
func (n *Notifier) Ready(status string) { n.send("READY=1", "STATUS="+status) }

// Reloading says that it reads its configuration again; Ready follows.
func (n *Notifier) Reloading() {
	var now unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &now)
	n.send("RELOADING=1", fmt.Sprintf("MONOTONIC_USEC=%d", now.Nano()/1000))
}

// Stopping says that it is about to end.
func (n *Notifier) Stopping() { n.send("STOPPING=1") }

// Watchdog says that the service lives, twice in each interval that the service
// manager asks for, as long as alive returns. It returns when ctx ends, at once
// if nobody asks.
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
