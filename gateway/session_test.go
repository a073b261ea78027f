// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	rpcstatus "google.golang.org/grpc/status"

	"github.com/ringbatch/ringbatch/internal/testlog"
	"github.com/ringbatch/ringbatch/worker"
)

// say writes to a new connection and reads one answer.
func (r *rig) say(text string) (status int, body string) {
	r.t.Helper()
	c := r.connect()
	if _, err := io.WriteString(c, text); err != nil {
		r.t.Fatal(err)
	}
	return r.hear(c)
}

func (r *rig) hear(c net.Conn) (status int, body string) {
	r.t.Helper()
	rep, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		r.t.Fatal(err)
	}
	all, err := io.ReadAll(rep.Body)
	if err != nil {
		r.t.Fatal(err)
	}
	return rep.StatusCode, string(all)
}

func TestAFaultEndsOneRequestNotTheGateway(t *testing.T) {
	var log testlog.Log
	m := doubler(t)
	r := newRig(t, func(c *Config) {
		c.Logger = slog.New(slog.NewTextHandler(&log, nil))
		c.Other = http.HandlerFunc(func(http.ResponseWriter, *http.Request) { panic("a fault of " + t.Name()) })
	}, m)
	r.worker(m, double)
	if status, body := r.say("GET /v2fault HTTP/1.1\r\nHost: h\r\n\r\n"); status != 500 || !strings.Contains(body, errFault.Error()) {
		t.Errorf("%d %s", status, body)
	}
	if rep, err := http.Get(r.http + "/fault"); err == nil { // net/http's, which hangs up
		t.Errorf("%v", rep.Status)
	}
	if n := strings.Count(log.String(), "a fault of "+t.Name()); n != 2 {
		t.Errorf("the log has it %d times, want 2:\n%s", n, log.String())
	}
	door := &rpcDoor{g: r.g}
	if _, err := door.infer(soon(t), func(any) error { panic("a fault of gRPC") }); rpcstatus.Code(err) != codes.Internal {
		t.Error(err)
	}
	if a := r.infer("double", `{"inputs":[`+goodInput+`]}`); a.status != 200 {
		t.Errorf("afterwards: %d %s", a.status, a.Error)
	}
	r.idle()
}

func TestLinesMayEndWithABareLF(t *testing.T) {
	m := doubler(t)
	r := newRig(t, nil, m)
	r.worker(m, double)
	body := `{"inputs":[` + goodInput + `]}`
	for _, head := range []string{
		"GET /v2/health/live HTTP/1.1\nHost: h\n\n",
		"GET /v2/health/live HTTP/1.1\r\nHost: h\r\n\n",
		"GET /v2/health/live HTTP/1.1\nHost: h\n\r\n",
		fmt.Sprintf("POST /v2/models/double/infer HTTP/1.1\nHost: h\nContent-Length: %d\n\n%s", len(body), body),
		fmt.Sprintf("POST /v2/models/double/infer HTTP/1.1\r\nHost: h\nContent-Length: %d\r\n\r\n%s", len(body), body),
	} {
		if status, text := r.say(head); status != 200 {
			t.Errorf("%q: %d %s", head, status, text)
		}
	}
}

func TestAMethodThatAPathDoesNotHaveIsRefusedWithThoseItHas(t *testing.T) {
	m := doubler(t)
	r := newRig(t, nil, m)
	r.worker(m, double)
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
		{"GET", "/v2/systemsharedmemory/region/r/register", "POST"},
		{"POST", "/v2/systemsharedmemory/status", "GET, HEAD"},
	} {
		req, err := http.NewRequestWithContext(soon(t), k.method, r.http+k.path, nil)
		if err != nil {
			t.Fatal(err)
		}
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
	r := newRig(t, func(c *Config) { c.ClaimWait = 2 * patience }, m)
	r.broker()
	// Somebody answers at the broker's place, but never says anything.
	l, err := net.Listen("unix", r.socket)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if a := r.infer("double", `{"parameters":{"timeout":100000},"inputs":[`+goodInput+`]}`); a.status != 504 {
		t.Errorf("HTTP: %d %s", a.status, a.Error)
	}
	ctx, cancel := context.WithTimeout(soon(t), 100*time.Millisecond)
	defer cancel()
	if _, err := r.client().ModelInfer(ctx, doubleMessage()); rpcstatus.Code(err) != codes.DeadlineExceeded {
		t.Error(err)
	}
}

func TestAChunkedRequestIsAnsweredAfterADrainBegan(t *testing.T) {
	m := doubler(t)
	r := newRig(t, nil, m)
	r.worker(m, double)
	c := r.connect()
	fmt.Fprint(c, "POST /v2/models/double/infer HTTP/1.1\r\nHost: h\r\n") // it has begun
	r.eventually("its first bytes are read", func() error {
		r.g.web.mu.Lock()
		defer r.g.web.mu.Unlock()
		for v := range r.g.web.sessions {
			if v.conn.busy() {
				return nil
			}
		}
		return fmt.Errorf("no session is busy")
	})
	stopped := make(chan error, 1)
	go func() { stopped <- r.stop() }()
	r.eventually("it drains", func() error {
		if n := r.g.draining.Load(); n != refusing {
			return fmt.Errorf("%d", n)
		}
		return nil
	})
	fmt.Fprint(c, "Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n")
	if status, body := r.hear(c); status != 503 || !strings.Contains(body, "shutting down") {
		t.Errorf("%d %s", status, body)
	}
	if err := <-stopped; err != nil {
		t.Error(err)
	}
}

func TestAFailedReloadIsTriedAgain(t *testing.T) {
	file := filepath.Join(t.TempDir(), "tokens")
	when := time.Now().Add(-time.Hour)
	write := func(text string, when time.Time) {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(file, when, when); err != nil {
			t.Fatal(err)
		}
	}
	write("one first-token-0123456789\n", when)
	g, err := New(Config{TokenFile: file, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	// Read in the middle of a change; then it is whole, and looks the same.
	write("two second-token 012345678\n", when.Add(time.Second))
	g.secrets.reload()
	write("two second-token-012345678\n", when.Add(time.Second))
	g.secrets.reload()
	if name, ok := g.secrets.now.Load().bearer("second-token-012345678"); name != "two" || !ok {
		t.Errorf("%q %v", name, ok)
	}
}

func TestAStormOfAbortedRequestsLeavesNothingBehind(t *testing.T) {
	m := doubler(t)
	r := newRig(t, nil, m)
	r.worker(m, func(ctx context.Context, b *worker.Batch) error {
		time.Sleep(100 * time.Microsecond)
		return double(ctx, b)
	})
	body := `{"inputs":[` + goodInput + `]}`
	if a := r.infer("double", body); a.status != 200 {
		t.Fatal(a.Error)
	}
	http.DefaultClient.CloseIdleConnections()
	descriptors := func() int {
		list, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
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
			text := fmt.Sprintf("POST /v2/models/double/infer HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
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
	if a := r.infer("double", body); a.status != 200 {
		t.Errorf("afterwards: %d %s", a.status, a.Error)
	}
}

func TestCallersWhoseBodiesComeSlowlyKeepNoSlots(t *testing.T) {
	const size = 4 * leastAwaited
	shape := fmt.Sprintf("u8[%d]", size)
	m := modelConfig(t, "large", []string{"x:" + shape}, []string{"y:" + shape})
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(2))
	slots := 2 + 1
	r := newRig(t, func(c *Config) {
		c.Window = slots
		c.pace = pace{body: 2 * patience, answer: patience, idle: patience, sweep: time.Second, rate: leastRate}
	}, m)
	r.worker(m, echo)
	head := fmt.Sprintf("POST /v2/models/large/infer HTTP/1.1\r\nHost: h\r\n%s: 0\r\nContent-Length: %d\r\n\r\n", headerLength, size)
	for range slots + 8 {
		c := r.connect()
		if _, err := io.WriteString(c, head+"only the beginning"); err != nil {
			t.Fatal(err)
		}
	}
	r.eventually("they are under way", func() error {
		if n := r.g.inFlight.Load(); n != int64(slots+8) {
			return fmt.Errorf("%d", n)
		}
		return nil
	})
	body := bytes.Repeat([]byte("a body that is there "), size)[:size]
	if a := r.post("/v2/models/large/infer", map[string]string{headerLength: "0"}, body); a.status != 200 || !bytes.Equal(a.raw, body) {
		t.Errorf("%d %s", a.status, a.Error)
	}
}

func TestABodyThatTheKernelHasCountsAsCome(t *testing.T) {
	const size, part = 1 << 18, 1 << 15
	m := modelConfig(t, "large", []string{"x:u8[262144]"}, []string{"y:u8[262144]"})
	var r *rig
	// send sends a body in eight parts, four times as fast as it has to be, and for
	// several times as long as a body may take beyond what its rate gives it. It says
	// whether this machine let it be that fast.
	send := func(body time.Duration) (status int, fast bool) {
		r = newRig(t, func(c *Config) {
			c.pace = pace{body: body, answer: patience, idle: patience, sweep: 10 * time.Millisecond, rate: int(part * time.Second / (5 * body))}
		}, m)
		r.worker(m, echo)
		r.g.inFlight.Add(1000) // as if there were that many: bodies are awaited
		c := r.connect()
		head := fmt.Sprintf("POST /v2/models/large/infer HTTP/1.1\r\nHost: h\r\n%s: 0\r\nContent-Length: %d\r\n\r\n", headerLength, size)
		began, last := time.Now(), time.Now()
		longest := time.Duration(0)
		for sent := 0; sent < size; sent += part {
			if _, err := c.Write(append([]byte(head), make([]byte, part)...)); err != nil {
				break // it was cut
			}
			head = ""
			longest, last = max(longest, time.Since(last)), time.Now()
			time.Sleep(body * 6 / 5)
		}
		if longest > 3*body {
			return 0, false
		}
		t.Logf("%v in all, at most %v between two parts", time.Since(began), longest)
		status, _ = r.hear(c)
		return status, true
	}
	for body := 50 * time.Millisecond; ; body *= 2 {
		status, fast := send(body)
		defer r.g.inFlight.Add(-1000)
		if !fast {
			continue // with more time
		}
		if status != 200 {
			t.Errorf("%d", status)
		}
		break
	}
	// And one that stops in the middle is cut.
	c := r.connect()
	fmt.Fprintf(c, "POST /v2/models/large/infer HTTP/1.1\r\nHost: h\r\n%s: 0\r\nContent-Length: 262144\r\n\r\n%s", headerLength, strings.Repeat("x", 1<<14))
	if status, text := r.hear(c); status != 408 {
		t.Errorf("%d %.100s", status, text)
	}
}
