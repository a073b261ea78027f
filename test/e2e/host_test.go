// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/admin/stats"
	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/test/testbed"
)

// patience is the time after which a step counts as stuck.
const patience = time.Minute

// lease is longer than any test: a worker that waits for the test, or for a machine
// that stands still, is not hung.
const lease = 10 * time.Minute

// host is a broker process and its peers.
type host struct {
	observer
	bed    *testbed.Bed
	job    testbed.BrokerJob
	uid    int            // of the broker; 0: this process's
	limits testbed.Limits // of the broker
	broker *proc
	before testbed.Usage // of the broker, before the first peer attaches
	mine   testbed.Usage // of this process, before the test
}

// theModel is declared by configuration, so that it stays when all peers leave.
var theModel = testbed.Model{Name: "m", Slots: 64, MaxBatch: 8, Wait: time.Millisecond, Lease: lease}

// newHost starts a broker, which ends with the test.
func newHost(t *testing.T, models ...testbed.Model) *host {
	t.Helper()
	h := idleHost(t, models...)
	h.startBroker()
	return h
}

// idleHost is a host whose broker has not been started.
func idleHost(t *testing.T, models ...testbed.Model) *host {
	t.Helper()
	mine := usageOf(t, os.Getpid())
	bed, err := testbed.New(context.Background()) // the test's context ends before its clean-up
	must.Do(t, err)
	t.Cleanup(bed.Close)
	h := &host{observer: observer{t, bed.Path("b.sock")}, bed: bed, mine: mine}
	h.job = testbed.BrokerJob{Socket: h.socket, Models: models, DrainTime: 10 * patience, WorkerGrace: 10 * patience}
	return h
}

func usageOf(t *testing.T, pid int) testbed.Usage {
	t.Helper()
	u, err := testbed.UsageOf(pid)
	must.Do(t, err)
	return u
}

// start runs this binary in a role. Its log is shown if the test failed.
func (h *host) start(s testbed.Spec) *proc {
	h.t.Helper()
	p, err := h.bed.Start(s)
	must.Do(h.t, err)
	h.t.Cleanup(func() {
		if h.t.Failed() {
			p.Signal(syscall.SIGQUIT) // it prints its goroutines
			_ = p.Wait(patience)
			h.t.Logf("--- %s:\n%s", p, p.Log())
		}
	})
	return &proc{p, h.t}
}

// launch starts a broker with the host's configuration, and does not wait for it.
func (h *host) launch() *proc {
	h.t.Helper()
	return h.start(testbed.Spec{Role: "broker", Job: h.job, Limits: h.limits, UID: h.uid})
}

func (h *host) startBroker() {
	h.t.Helper()
	h.broker = h.launch()
	h.broker.expect("ready")
	h.before = usageOf(h.t, h.broker.Pid())
}

// worker starts a worker and waits until it is attached.
func (h *host) worker(m testbed.Model) *proc { return h.workerThat("", m) }

// workerThat starts a worker. A worker that works "patiently" stops in the middle of a
// slow request until SIGUSR1.
func (h *host) workerThat(do string, m testbed.Model) *proc {
	h.t.Helper()
	p := h.newWorker(job{Model: m, Do: do})
	h.eventually("worker attached", func() error { _, err := h.workerStats(m.Name, p); return err })
	return p
}

// newWorker starts a worker and does not wait for it.
func (h *host) newWorker(j job) *proc {
	h.t.Helper()
	j.Socket = h.socket
	return h.start(testbed.Spec{Role: "worker", Job: j, Limits: testbed.Limits{Group: h.limits.Group}})
}

// workerStats has the statistics of a worker.
func (h *host) workerStats(model string, p *proc) (*stats.Worker, error) {
	ws := h.model(model).Workers
	for i := range ws {
		if ws[i].Pid == p.Pid() {
			return &ws[i], nil
		}
	}
	return nil, fmt.Errorf("%s is not attached", p)
}

// client starts a client that stops at a step of its request.
func (h *host) client(do string) *proc {
	return h.start(testbed.Spec{Role: "client", Job: job{Socket: h.socket, Model: theModel, Do: do}})
}

// dial attaches this process as a client; the caller closes it.
func (h *host) dial(opts ...client.Option) *client.Client {
	h.t.Helper()
	c, err := h.tryDial(append(opts, client.WaitForModel())...)
	must.Do(h.t, err)
	return c
}

// tryDial dials once.
func (h *host) tryDial(opts ...client.Option) (*client.Client, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	return client.Dial(ctx, "m", append(opts, client.WithSocket(h.socket))...)
}

// observer reads a broker's statistics.
type observer struct {
	t      *testing.T
	socket string
}

func (o *observer) stats() (s *stats.Broker) {
	o.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	o.eventually("stats", func() (err error) {
		began := time.Now()
		s, err = admin.New(o.socket).Stats(ctx)
		// The broker may not have noticed yet that others left.
		if err != nil && !errors.Is(err, status.ErrTooManyConnections) && !errors.Is(err, status.ErrNoDescriptors) && !tookTooLong(began) {
			o.t.Fatalf("stats: %v", err)
		}
		return err
	})
	return s
}

// tookTooLong reports whether a call to the broker timed out after its 10 seconds,
// because this machine stood still.
func tookTooLong(began time.Time) bool { return time.Since(began) >= 10*time.Second }

// model is the statistics of a model, or zero.
func (o *observer) model(name string) stats.Model {
	o.t.Helper()
	if m := o.stats().Model(name); m != nil {
		return *m
	}
	return stats.Model{}
}

// set changes a key of the policy of model m.
func (o *observer) set(key, value string) {
	o.t.Helper()
	must.Do(o.t, admin.New(o.socket).Set(o.t.Context(), "m", map[string]string{key: value}))
}

// eventually waits until f returns nil.
func (o *observer) eventually(what string, f func() error) {
	o.t.Helper()
	if err := testbed.Eventually(patience, f); err != nil {
		o.t.Fatalf("%s: %v", what, err)
	}
}

// until waits until the statistics of a model are as expected.
func (o *observer) until(what, model string, is func(m stats.Model) bool) {
	o.t.Helper()
	o.eventually(what, func() error {
		if m := o.model(model); !is(m) {
			return fmt.Errorf("%+v", m)
		}
		return nil
	})
}

// wait waits for goroutines that send requests. If one does not end, it prints the
// broker's statistics.
func (o *observer) wait(wg *sync.WaitGroup) {
	o.t.Helper()
	done := make(chan struct{})
	go func() { wg.Wait(); close(done) }()
	select {
	case <-done:
	case <-time.After(patience):
		text, _ := json.MarshalIndent(o.stats(), "", " ")
		o.t.Fatalf("requests have no end; the broker says\n%s", text)
	}
}

// queued waits until n requests are queued.
func (h *host) queued(n int) {
	h.t.Helper()
	h.until("the queue's length", "m", func(m stats.Model) bool { return m.QueueLength == n })
}

// settled waits until no client is attached, every slot is back, and every accepted
// request has ended once. The broker must have no more descriptors, mappings and
// threads than before the first peer, apart from attached workers.
func (h *host) settled() {
	h.t.Helper()
	h.eventually("everything is given back", func() error {
		workers := 0
		for _, m := range h.stats().Models {
			workers += len(m.Workers)
			if err := testbed.Settled(&m); err != nil {
				return err
			}
		}
		return usageOf(h.t, h.broker.Pid()).Within(h.before.WithWorkers(workers))
	})
	h.eventually("this process has nothing left", func() error { return usageOf(h.t, os.Getpid()).Within(h.mine) })
}

// draining waits until the broker is draining.
func (h *host) draining() {
	h.t.Helper()
	h.eventually("it is draining", func() error {
		if !h.stats().Draining {
			return errors.New("not yet")
		}
		return nil
	})
}

// drained expects that the broker finishes the accepted requests, and ends.
func (h *host) drained() {
	h.t.Helper()
	h.broker.expect("drained")
	must.Check(h.t, h.broker.end())
}

// stop ends the broker by SIGTERM.
func (h *host) stop() {
	h.t.Helper()
	h.broker.Signal(syscall.SIGTERM)
	h.drained()
	if _, err := os.Lstat(h.socket); !os.IsNotExist(err) {
		h.t.Errorf("%s is still there: %v", h.socket, err)
	}
}

// proc is a child process of a test.
type proc struct {
	*testbed.Process
	t *testing.T
}

// end waits for its end and returns its exit status as an error.
func (p *proc) end() error {
	p.t.Helper()
	err := p.Wait(patience)
	if errors.Is(err, testbed.ErrRunning) {
		p.t.Fatalf("%s does not end", p)
	}
	return err
}

// expect waits for a message of that name.
func (p *proc) expect(name string) {
	p.t.Helper()
	must.Do(p.t, p.Expect(name, nil, patience))
}

// refused expects that error as the process's first message, with these parts in its
// text.
func (p *proc) refused(want error, parts ...string) {
	p.t.Helper()
	err := p.Expect("a refusal", nil, patience)
	for _, part := range append(parts, want.Error()) {
		if err == nil || !strings.Contains(err.Error(), part) {
			p.t.Errorf("%s got %v, not %q", p, err, part)
		}
	}
}

// nonce makes the requests of this process different.
var nonce atomic.Int64

// ask runs one request and checks the answer.
func ask(ctx context.Context, c *client.Client, cmd, arg int64, rows int) error {
	return askSized(ctx, c, testbed.Width, cmd, arg, rows)
}

func askSized(ctx context.Context, c *client.Client, width int, cmd, arg int64, rows int) error {
	x := make([]int64, width*rows)
	n := nonce.Add(1)
	rng := rand.New(rand.NewSource(n))
	for r := range rows {
		row := x[r*width : (r+1)*width]
		for j := range row {
			row[j] = rng.Int63()
		}
		row[0], row[1], row[2] = 0, n, arg
	}
	x[0] = cmd
	return testbed.Ask(ctx, c, x, width)
}

// asking is a request in flight.
type asking chan error

func askLater(ctx context.Context, c *client.Client, cmd, arg int64) asking {
	ch := make(asking, 1)
	go func() { ch <- ask(ctx, c, cmd, arg, 1) }()
	return ch
}

// ends waits for the end of the request and compares it with want; nil is a correct
// answer.
func (a asking) ends(t *testing.T, want error) {
	t.Helper()
	select {
	case err := <-a:
		if !errors.Is(err, want) {
			t.Errorf("request ended with %v, expected %v", err, want)
		}
	case <-time.After(patience):
		stacks := make([]byte, 1<<16)
		t.Fatalf("request has no end, expected %v\n%s", want, stacks[:runtime.Stack(stacks, true)])
	}
}

// works sends some requests and expects correct answers.
func works(t *testing.T, c *client.Client, n int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	var all []asking
	for range n {
		all = append(all, askLater(ctx, c, cmdAnswer, 0))
	}
	for _, a := range all {
		a.ends(t, nil)
	}
}

func background(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}
