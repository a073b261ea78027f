// SPDX-License-Identifier: Apache-2.0

package core

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/status"
)

func TestEveryNamedErrorHasAMeaningOnBothProtocols(t *testing.T) {
	for _, code := range status.All() {
		m, ok := meanings[code]
		if code == status.OK {
			continue
		}
		if !ok {
			t.Errorf("%s has none", code.Name())
			continue
		}
		if m.HTTP < 400 || m.HTTP > 599 || m.GRPC == codes.OK || m.GRPC == codes.Unknown {
			t.Errorf("%s: %d, %s", code.Name(), m.HTTP, m.GRPC)
		}
		if got := MeaningOf(fmt.Errorf("doing: %w", code)); got != m {
			t.Errorf("%s wrapped is %v", code.Name(), got)
		}
		// Load tools and proxies retry these by themselves.
		retried := m.HTTP == 429 || m.HTTP == 503
		if retried && !status.Retryable(code) && m.GRPC != codes.Unavailable && m.GRPC != codes.ResourceExhausted {
			t.Errorf("%s may be retried over HTTP only", code.Name())
		}
	}
	for err, want := range map[error]int{context.DeadlineExceeded: 504, context.Canceled: 499, errors.New("whatever"): 500} {
		if m := MeaningOf(err); m.HTTP != want {
			t.Errorf("%v: %d", err, m.HTTP)
		}
	}
}

func TestAShareHasABatchWhereTheWindowHasTwo(t *testing.T) {
	for _, k := range [][3]int{{512, 32, 128}, {128, 32, 32}, {64, 32, 32}, {40, 32, 20}, {8, 8, 4}, {1, 8, 1}} {
		if got := shareOf(k[0], k[1]); got != k[2] {
			t.Errorf("a window of %d, batches of %d: %d, want %d", k[0], k[1], got, k[2])
		}
	}
}

// A socket that its owner has closed is listed as root's.
func TestACallerThatHungUpIsNobody(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must.Do(t, err)
	defer l.Close()
	theirs, err := net.Dial("tcp", l.Addr().String())
	must.Do(t, err)
	ours, err := l.Accept()
	must.Do(t, err)
	defer ours.Close()
	local, remote := addrPort(ours.LocalAddr()), addrPort(ours.RemoteAddr())
	if _, err := socketUser(remote, local); err != nil {
		t.Fatalf("a caller that is there: %v", err)
	}
	theirs.Close()
	_, _ = io.ReadAll(ours) // it is closed when this ends
	if uid, err := socketUser(remote, local); err == nil {
		t.Errorf("a caller that has hung up is user %d", uid)
	}
}

func TestAModelIsAwaitedForAWhileAfterTheBrokerDrainedOrWasRestarted(t *testing.T) {
	for _, c := range []struct {
		what    string
		listing admin.Listing
		workers time.Duration
		awaited bool
	}{
		{"the same broker", admin.Listing{Epoch: 1}, time.Hour, false},
		{"it drains", admin.Listing{Epoch: 1, Draining: true}, time.Hour, true},
		{"another broker", admin.Listing{Epoch: 2}, time.Hour, true},
		{"long after that", admin.Listing{Epoch: 2}, -time.Hour, false},
	} {
		g := &Gateway{}
		g.Cfg.Pace.Workers = c.workers
		m := newModels(g)
		m.noteRestart(&admin.Listing{Epoch: 1})
		m.noteRestart(&c.listing)
		if err := m.awaited("double"); (err != nil) != c.awaited {
			t.Errorf("%s: %v", c.what, err)
		}
	}
}
