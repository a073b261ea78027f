// SPDX-License-Identifier: Apache-2.0

package core_test

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	rpcstatus "google.golang.org/grpc/status"

	"github.com/ringbatch/ringbatch/gateway/core"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/test/testlog"
	"github.com/ringbatch/ringbatch/worker"
)

func TestAFaultEndsOneRequestNotTheGateway(t *testing.T) {
	var log testlog.Log
	m := doubler(t)
	r := newRig(t, func(c *core.Config) {
		c.Logger = slog.New(slog.NewTextHandler(&log, nil))
		c.Other = http.HandlerFunc(func(http.ResponseWriter, *http.Request) { panic("a fault of " + t.Name()) })
	}, m)
	r.worker(m, double)
	if rep, err := http.Get(r.http + "/fault"); err == nil {
		t.Errorf("%v", rep.Status)
	}
	if n := strings.Count(log.String(), "a fault of "+t.Name()); n != 1 {
		t.Errorf("the log has it %d times, want 1:\n%s", n, log.String())
	}
	r.infer("double", goodBody).is(t, "afterwards", 200)
	r.idle()
}

func TestAMethodThatAPathDoesNotHaveIsRefusedWithThoseItHas(t *testing.T) {
	r := doublingRig(t, nil)
	for _, k := range []struct{ method, path, allow string }{
		{"POST", "/v2", "GET, HEAD"},
		{"DELETE", "/v2/health/live", "GET, HEAD"},
		{"POST", "/v2/health/ready", "GET, HEAD"},
		{"PUT", "/v2/models/double", "GET, HEAD"},
		{"POST", "/v2/models/double/config", "GET, HEAD"},
		{"POST", "/v2/models/double/stats", "GET, HEAD"},
		{"POST", "/v2/models/stats", "GET, HEAD"},
		{"GET", "/v2/models/double/infer", "POST"},
		{"PUT", "/v2/models/double/versions/1/infer", "POST"},
		{"DELETE", "/v2/repository/index", "GET, HEAD, POST"},
		{"GET", "/v2/repository/models/double/load", "POST"},
		{"GET", "/v2/systemsharedmemory/region/r/register", "POST"}, // a link changes nothing
		{"GET", "/v2/systemsharedmemory/unregister", "POST"},
		{"POST", "/v2/systemsharedmemory/status", "GET, HEAD"},
	} {
		req, err := http.NewRequestWithContext(soon(t), k.method, r.http+k.path, nil)
		must.Do(t, err)
		if a := r.do(req); a.status != 405 || a.header.Get("Allow") != k.allow || a.Error == "" {
			t.Errorf("%s %s: %d, Allow %q, %q", k.method, k.path, a.status, a.header.Get("Allow"), a.Error)
		}
	}
	for _, path := range []string{"/v2", "/v2/health/live", "/v2/models/double"} {
		if rep, err := http.Head(r.http + path); err != nil || rep.StatusCode != 200 {
			t.Errorf("HEAD %s: %v %v", path, rep, err)
		}
	}
}

func TestACallersTimeoutHoldsWhileItsModelIsDialled(t *testing.T) {
	m := doubler(t)
	r := newRig(t, func(c *core.Config) { c.ClaimWait = 2 * patience }, m)
	r.broker()
	// Somebody answers at the broker's place, but never says anything.
	l, err := net.Listen("unix", r.socket)
	must.Do(t, err)
	defer l.Close()
	r.infer("double", `{"parameters":{"timeout":100000},"inputs":[`+goodInput+`]}`).is(t, "HTTP", 504)
	ctx, cancel := context.WithTimeout(soon(t), 100*time.Millisecond)
	defer cancel()
	if _, err := r.client().ModelInfer(ctx, doubleMessage()); rpcstatus.Code(err) != codes.DeadlineExceeded {
		t.Error(err)
	}
}

func TestAStormOfAbortedRequestsLeavesNothingBehind(t *testing.T) {
	m := doubler(t)
	r := newRig(t, nil, m)
	r.worker(m, func(ctx context.Context, b *worker.Batch) error {
		time.Sleep(100 * time.Microsecond)
		return double(ctx, b)
	})
	r.served(goodBody)
	http.DefaultClient.CloseIdleConnections()
	descriptors := func() int {
		list, err := os.ReadDir("/proc/self/fd")
		must.Do(t, err)
		return len(list)
	}
	r.idle()
	// The gateway asks the broker for its models now and then: some come and go.
	const others = 8
	goroutines, open := runtime.NumGoroutine()+others, descriptors()+others
	const storm, callers = 500, 20 // of each protocol
	var wg sync.WaitGroup
	for k := range callers {
		wg.Add(2)
		go func() { // HTTP: hung up on after a part of the request, or all of it
			defer wg.Done()
			text := plainDouble()
			for i := range storm / callers {
				c, err := net.Dial("tcp", strings.TrimPrefix(r.http, "http://"))
				if err != nil {
					t.Error(err)
					return
				}
				n := (i*37 + k*11) % (2 * len(text))
				_, _ = io.WriteString(c, text[:min(n, len(text))])
				_ = c.(*net.TCPConn).SetLinger(i % 2 * -1) // every other one by a reset
				c.Close()
			}
		}()
		go func() { // gRPC: canceled before, while, or after it runs
			defer wg.Done()
			c := r.client()
			for i := range storm / callers {
				ctx, cancel := context.WithTimeout(soon(t), time.Duration(i*20)*time.Microsecond)
				_, _ = c.ModelInfer(ctx, doubleMessage())
				cancel()
			}
		}()
	}
	wg.Wait()
	r.hangUp()
	r.idle()
	r.eventually("goroutines and descriptors are back", func() error {
		if n, d := runtime.NumGoroutine(), descriptors(); n > goroutines || d > open {
			return fmt.Errorf("%d goroutines of %d before, %d descriptors of %d", n, goroutines, d, open)
		}
		return nil
	})
	r.infer("double", goodBody).is(t, "afterwards", 200)
}
