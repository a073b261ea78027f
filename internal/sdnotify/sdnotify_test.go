// SPDX-License-Identifier: Apache-2.0

package sdnotify

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/internal/must"
)

// manager is a service manager's end.
func manager(t *testing.T) (said func() string) {
	dir, err := os.MkdirTemp("", "rb") // t.TempDir is too long for a socket
	must.Do(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	path := filepath.Join(dir, "notify")
	c, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	must.Do(t, err)
	t.Cleanup(func() { c.Close() })
	t.Setenv("NOTIFY_SOCKET", path)
	return func() string {
		_ = c.SetReadDeadline(time.Now().Add(30 * time.Second))
		b := make([]byte, 4096)
		n, err := c.Read(b)
		must.Do(t, err)
		return string(b[:n])
	}
}

func TestTheServiceManagerIsToldAndItsSocketIsNotInherited(t *testing.T) {
	said := manager(t)
	t.Setenv("WATCHDOG_USEC", "20000")
	n := FromEnvironment()
	if os.Getenv("NOTIFY_SOCKET") != "" || os.Getenv("WATCHDOG_USEC") != "" {
		t.Error("children would speak for this process")
	}
	for _, c := range []struct {
		do   func()
		want string
	}{
		{func() { n.Ready("serves") }, "READY=1\nSTATUS=serves"},
		{n.Reloading, "RELOADING=1\nMONOTONIC_USEC="},
		{n.Stopping, "STOPPING=1"},
	} {
		if c.do(); !strings.HasPrefix(said(), c.want) {
			t.Errorf("not told: %q", c.want)
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	asked := 0
	go func() { defer close(ended); n.Watchdog(ctx, func() { asked++ }) }()
	for range 3 {
		if got := said(); got != "WATCHDOG=1" {
			t.Errorf("the watchdog heard %q", got)
		}
	}
	cancel()
	<-ended
	if asked < 3 {
		t.Errorf("it was said to live after %d answers", asked)
	}
}

func TestWithoutAServiceManagerNothingIsSaid(t *testing.T) {
	t.Setenv("NOTIFY_SOCKET", "")
	n := FromEnvironment()
	n.Ready("x")
	n.Stopping()
	n.Watchdog(context.Background(), func() { t.Error("asked for nobody") })
}
