// SPDX-License-Identifier: Apache-2.0

package core_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/admin/stats"
	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/client/ringbatchtest"
	"github.com/ringbatch/ringbatch/gateway"
	"github.com/ringbatch/ringbatch/gateway/core"
	"github.com/ringbatch/ringbatch/gateway/oip"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/internal/testhooks"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/worker"
)

// headerLength is the header with the length of a binary body's JSON.
const headerLength = "Inference-Header-Content-Length"

// patience is for what surely comes, on any machine.
const patience = 2 * time.Minute

// rig is a broker, workers and a gateway in this process, and callers over
// real sockets.
type rig struct {
	t      *testing.T
	socket string
	g      *core.Gateway
	doors  *gateway.Gateway
	http   string // base of URLs
	grpc   string
	stop   func() error // drains the gateway
	broker func()       // ends the broker

	mu      sync.Mutex
	dialled []*grpc.ClientConn
}

func soon(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

func signature(t testing.TB, inputs, outputs []string) tensor.Signature {
	t.Helper()
	sig, err := tensor.ParseSignature(inputs, outputs)
	must.Do(t, err)
	return sig
}

func modelConfig(t testing.TB, name string, inputs, outputs []string) broker.ModelConfig {
	m := broker.ModelConfig{Name: name, Signature: signature(t, inputs, outputs)}
	m.Policy = policy.New(policy.MaxBatchSize(8), policy.WaitTime(0), policy.Slots(64))
	return m
}

// newRig starts everything but workers.
func newRig(t *testing.T, change func(*core.Config), models ...broker.ModelConfig) *rig {
	t.Helper()
	dir, err := os.MkdirTemp("", "rb") // a test's own can be too long for a socket
	must.Do(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	r := &rig{t: t, socket: filepath.Join(dir, "b.sock")}
	testhooks.MakeSegments(r.socket, shm.CreateOnHeap)
	r.startBroker(models...)
	cfg := core.Config{Socket: r.socket, HTTP: "127.0.0.1:0", GRPC: "127.0.0.1:0", Logger: slog.New(slog.DiscardHandler),
		ClaimWait: patience, DrainTime: patience, AllowedHosts: []string{"h"}, Pace: core.Pace{Stall: patience}}
	if change != nil {
		change(&cfg)
	}
	started := make(chan struct{})
	cfg.Started = func(web, rpc net.Addr) {
		if web != nil {
			r.http = "http://" + web.String()
		}
		if rpc != nil {
			r.grpc = rpc.String()
		}
		close(started)
	}
	g, err := core.New(cfg)
	must.Do(t, err)
	r.g, r.doors = g, gateway.New(g)
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- r.doors.Serve(ctx) }()
	select {
	case <-started:
	case err := <-served:
		t.Fatal(err)
	}
	var ended error
	done := false
	r.stop = func() error {
		if !done {
			done = true
			cancel()
			ended = <-served
		}
		return ended
	}
	t.Cleanup(func() {
		http.DefaultClient.CloseIdleConnections() // another rig may get this one's port
		_ = r.stop()
	})
	for _, m := range models {
		if len(cfg.Models) > 0 && !slices.Contains(cfg.Models, m.Name) {
			continue
		}
		r.eventually("the model is known", func() error {
			_, _, err := g.Models.Get(soon(t), m.Name, "")
			if err != nil && strings.Contains(err.Error(), "has no such type") {
				return nil
			}
			return err
		})
	}
	return r
}

func (r *rig) startBroker(models ...broker.ModelConfig) {
	r.t.Helper()
	b, err := broker.New(broker.Config{Socket: r.socket, Models: models, DrainTime: time.Second,
		Logger: slog.New(slog.DiscardHandler)})
	must.Do(r.t, err)
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- b.Serve(ctx) }()
	done := false
	r.broker = func() {
		if !done {
			done = true
			cancel()
			<-served
		}
	}
	r.t.Cleanup(r.broker)
}

// worker serves a declared model until the test ends, or leave is called.
func (r *rig) worker(m broker.ModelConfig, fn worker.Func) (leave func()) {
	r.t.Helper()
	end := ringbatchtest.Serve(worker.Config{Model: m.Name, Signature: m.Signature, Socket: r.socket}, fn)
	leave = sync.OnceFunc(func() {
		if err := end(); err != nil {
			r.t.Logf("worker: %v", err)
		}
	})
	r.t.Cleanup(leave)
	return leave
}

// echo gives each output the bytes of the input of its place.
func echo(_ context.Context, b *worker.Batch) error {
	for k := range b.Signature().Outputs {
		for i := range b.Rows() {
			copy(b.Output(k).Bytes(i), b.Input(k).Bytes(i))
		}
	}
	return nil
}

// sameSize is echo for a variable second dimension: the output is as large as the
// worker's view, which may be a bucket.
func sameSize(ctx context.Context, b *worker.Batch) error {
	for i := range b.Len() {
		if err := b.SetOutputDims(i, b.Input(0).RowShape()[1]); err != nil {
			return err
		}
	}
	return echo(ctx, b)
}

func (r *rig) eventually(what string, f func() error) {
	r.t.Helper()
	var err error
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		if err = f(); err == nil {
			return
		}
	}
	r.t.Fatalf("%s: %v", what, err)
}

// until waits until is() is true. Its failure shows the broker's statistics.
func (r *rig) until(what string, is func() bool) {
	r.t.Helper()
	for deadline := time.Now().Add(patience); !is(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			text, err := admin.New(r.socket).StatsJSON(soon(r.t))
			r.t.Fatalf("%s: not in %v; the broker says %s %v", what, patience, text, err)
		}
	}
}

// doublingRig is newRig with the model double and a worker of it.
func doublingRig(t *testing.T, change func(*core.Config)) *rig {
	t.Helper()
	m := doubler(t)
	r := newRig(t, change, m)
	r.worker(m, double)
	return r
}

// underWay waits until that many requests are in flight.
func (r *rig) underWay(want int64) {
	r.t.Helper()
	r.until(fmt.Sprint(want, " requests are in flight"), func() bool { return r.g.InFlight.Load() == want })
}

// get returns the status of a path.
func (r *rig) get(path string) int {
	r.t.Helper()
	rep, err := http.Get(r.http + path)
	must.Do(r.t, err)
	rep.Body.Close()
	return rep.StatusCode
}

// served waits until the model double answers.
func (r *rig) served(body string) {
	r.t.Helper()
	r.eventually("it is served", func() error {
		if a := r.infer("double", body); a.status != 200 {
			return fmt.Errorf("%d %s", a.status, a.Error)
		}
		return nil
	})
}

func (r *rig) stats(model string) *stats.Model {
	r.t.Helper()
	s, err := admin.New(r.socket).Stats(soon(r.t))
	must.Do(r.t, err)
	return s.Model(model)
}

// idle waits until no slot of the gateway's is in use and nothing is counted.
func (r *rig) idle() {
	r.t.Helper()
	r.eventually("everything is given back", func() error {
		runtime.GC() // the transport forgets the buffers of broken connections
		if n := r.g.InFlight.Load(); n != 0 {
			return fmt.Errorf("%d in flight", n)
		}
		if n := r.g.Used().Load(); n > core.SmallBuffer { // frames of connections that live
			return fmt.Errorf("%d bytes are counted", n)
		}
		for _, k := range r.g.Models.List() {
			if err := k.AllFree(); err != nil {
				return err
			}
		}
		return nil
	})
}

func (r *rig) client(opts ...grpc.DialOption) oip.GRPCInferenceServiceClient {
	r.t.Helper()
	c, err := grpc.NewClient(r.grpc, append([]grpc.DialOption{grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(1<<30), grpc.MaxCallSendMsgSize(1<<30))}, opts...)...)
	must.Do(r.t, err)
	r.t.Cleanup(func() { c.Close() })
	r.mu.Lock()
	defer r.mu.Unlock()
	r.dialled = append(r.dialled, c)
	return oip.NewGRPCInferenceServiceClient(c)
}

// hangUp ends the connections of all the clients so far.
func (r *rig) hangUp() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, c := range r.dialled {
		c.Close()
	}
	http.DefaultClient.CloseIdleConnections()
}

// httpAnswer is the answer to an HTTP request.
type httpAnswer struct {
	status     int
	header     http.Header
	Error      string         `json:"error"`
	ID         string         `json:"id"`
	Model      string         `json:"model_name"`
	Version    string         `json:"model_version"`
	Parameters map[string]any `json:"parameters"`
	Outputs    []struct {
		Name       string
		Datatype   string
		Shape      []int
		Data       []any
		Parameters map[string]any
	}
	raw []byte // the tensors after the JSON
}

// is fails the test if the answer has another status, or an error without that reason.
func (a *httpAnswer) is(t *testing.T, what string, status int, reason ...string) {
	t.Helper()
	if a.status != status || !strings.Contains(a.Error, strings.Join(reason, "")) {
		t.Errorf("%s: %d %q, not %d %q", what, a.status, a.Error, status, reason)
	}
}

// post sends a body and reads the answer.
func (r *rig) post(path string, header map[string]string, body []byte) *httpAnswer {
	r.t.Helper()
	req, err := http.NewRequestWithContext(soon(r.t), http.MethodPost, r.http+path, bytes.NewReader(body))
	must.Do(r.t, err)
	for k, v := range header {
		req.Header.Set(k, v)
	}
	return r.do(req)
}

func (r *rig) do(req *http.Request) *httpAnswer {
	r.t.Helper()
	rep, err := http.DefaultClient.Do(req)
	must.Do(r.t, err)
	defer rep.Body.Close()
	all, err := io.ReadAll(rep.Body)
	must.Do(r.t, err)
	a := &httpAnswer{status: rep.StatusCode, header: rep.Header}
	if text := rep.Header.Get(headerLength); text != "" {
		n, err := strconv.Atoi(text)
		if err != nil || n > len(all) {
			r.t.Fatalf("%s: %q of %d bytes", headerLength, text, len(all))
		}
		all, a.raw = all[:n], all[n:]
	}
	if len(all) > 0 && all[0] == '{' {
		if err := json.Unmarshal(all, a); err != nil {
			r.t.Fatalf("%s: %v", all, err)
		}
	}
	return a
}

// infer posts JSON to a model.
func (r *rig) infer(model, body string) *httpAnswer {
	r.t.Helper()
	return r.post("/v2/models/"+model+"/infer", nil, []byte(body))
}

// inferBinary posts JSON and the tensors after it.
func (r *rig) inferBinary(model, head string, tensors ...[]byte) *httpAnswer {
	r.t.Helper()
	return r.post("/v2/models/"+model+"/infer", map[string]string{headerLength: strconv.Itoa(len(head))},
		append([]byte(head), bytes.Join(tensors, nil)...))
}

// connect opens a connection to the HTTP door, for requests by hand.
func (r *rig) connect() net.Conn { return r.connectFrom("127.0.0.1") }

// connectFrom connects from another address of this host.
func (r *rig) connectFrom(address string) net.Conn {
	r.t.Helper()
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(address)}}
	c, err := d.DialContext(soon(r.t), "tcp", strings.TrimPrefix(r.http, "http://"))
	must.Do(r.t, err)
	_ = c.SetDeadline(time.Now().Add(patience))
	r.t.Cleanup(func() { c.Close() })
	return c
}

// ask writes a request and reads its answer.
func (r *rig) ask(c net.Conn, request string) error {
	if _, err := io.WriteString(c, request); err != nil {
		return err
	}
	rep, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		return err
	}
	defer rep.Body.Close()
	text, err := io.ReadAll(rep.Body)
	if err == nil && rep.StatusCode != 200 {
		err = fmt.Errorf("%d %s", rep.StatusCode, text)
	}
	return err
}

func plainDouble() string {
	return fmt.Sprintf(inferDouble+"Content-Length: %d\r\n\r\n%s", len(goodBody), goodBody)
}
