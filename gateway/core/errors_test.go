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
	"github.com/ringbatch/ringbatch/admin/alias"
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
		if retried && !code.Retryable() && m.GRPC != codes.Unavailable && m.GRPC != codes.ResourceExhausted {
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

func TestWhatIsAwaitedAfterARestartOfTheBroker(t *testing.T) {
	m, k := newModels(nil), &Model{}
	before := func(until time.Duration, names ...string) {
		f := &former{map[string]bool{}, time.Now().Add(until)}
		for _, name := range names {
			f.names[name] = true
		}
		m.former.Store(f)
	}
	awaits := func(when, name, version string, want bool) {
		t.Helper()
		if err := m.Awaited(name, version); (err != nil) != want {
			t.Errorf("%s: %s, version %q: %v", when, name, version, err)
		}
	}
	prod := func(three, four *Model) *map[string]*route {
		return &map[string]*route{"prod": {Alias: alias.Alias{Name: "prod", To: []alias.Target{{Model: "resnet@3"}, {Model: "resnet@4"}}},
			to: []*Model{three, four}}}
	}
	before(24*time.Hour, "prod", "resnet@3", "resnet@4")
	m.Routes.Store(prod(nil, nil)) // the broker's file has the alias
	m.forgetReturned()
	awaits("nothing is back", "prod", "", true)
	for version, want := range map[string]bool{"3": true, "resnet@4": true, "5": false, "prod": false} {
		awaits("nothing is back", "prod", version, want)
	}
	awaits("nothing is back", "resnet", "3", true)

	readers := m.former.Load().names
	m.byName.Store(&map[string]*Model{"resnet@3": k})
	m.Routes.Store(prod(k, nil))
	m.forgetReturned()
	awaits("one is back", "prod", "4", true)
	if len(readers) != 3 {
		t.Errorf("what readers have has changed: %v", readers)
	}
	m.byName.Store(&map[string]*Model{})
	m.Routes.Store(prod(nil, nil))
	awaits("it was removed", "resnet@3", "", false)
	awaits("it was removed", "prod", "3", false)
	awaits("it was removed", "prod", "", false)
	awaits("it was removed", "prod", "4", true)

	m.g = &Gateway{}
	m.g.Cfg.Pace.Workers = 24 * time.Hour
	m.former.Store(&former{})
	m.Routes.Store(&map[string]*route{})
	m.byName.Store(&map[string]*Model{"double": k})
	m.remember(&admin.Listing{Epoch: 1})
	m.remember(&admin.Listing{Epoch: 1, Draining: true})
	m.byName.Store(&map[string]*Model{}) // its worker was told to go
	m.remember(&admin.Listing{Epoch: 2})
	awaits("the broker had drained", "double", "", true)

	before(-time.Hour, "double")
	awaits("long after it", "double", "", false)
}
