// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand"
	"os"
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

// patience is how long anything may take here before it counts as stuck.
const patience = time.Minute

// lease is longer than anything here takes: a worker that waits for the test, or
// for a machine that stands still, is not hung.
const lease = 10 * time.Minute

// host is a broker process with what belongs to it.
type host struct {
	t      *testing.T
	bed    *testbed.Bed
	socket string
	job    testbed.BrokerJob
	uid    int            // of the broker, if it is not this process's
	wrap   []string       // what runs the broker's binary, if not the binary itself
	limits testbed.Limits // of the broker and of those that join it
	broker *proc
	before testbed.Usage // of the broker, when nobody is attached
	mine   testbed.Usage // of this process, before the test
}

// theModel is what most tests use: declared by configuration, so that it
// stays when everybody leaves.
var theModel = testbed.Model{Name: "m", Slots: 64, MaxBatch: 8, Wait: time.Millisecond, Lease: lease}

// newHost starts a broker and, when the test ends, leaves nothing behind.
func newHost(t *testing.T, models ...testbed.Model) *host {
	t.Helper()
	h := idleHost(t, models...)
	h.startBroker()
	return h
}

// idleHost is a host whose broker has not been started.
func idleHost(t *testing.T, models ...testbed.Model) *host {
	t.Helper()
	h := &host{t: t, mine: usageOf(t, os.Getpid())}
	bed, err := testbed.New(context.Background()) // not the test's, which ends before its clean-up
	must.Do(t, err)
	t.Cleanup(bed.Close)
	h.bed, h.socket = bed, bed.Path("b.sock")
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
			h.t.Logf("--- %s:\n%s", p, p.Log())
		}
	})
	return &proc{p, h.t}
}

// launch starts a broker as this host's is, and does not wait for it.
func (h *host) launch() *proc {
	h.t.Helper()
	return h.start(testbed.Spec{Role: "broker", Job: h.job, Limits: h.limits, UID: h.uid, Wrap: h.wrap})
}

func (h *host) startBroker() {
	h.t.Helper()
	h.broker = h.launch()
	h.broker.expect("ready")
	h.before = usageOf(h.t, h.broker.Pid())
}

// worker starts a worker and waits until the broker has it.
func (h *host) worker(m testbed.Model) *proc { return h.workerThat("", m) }

// workerThat starts a worker with a habit; one that works "patiently" stops
// in the middle of a slow request until it gets SIGUSR1.
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

// keepWorker has a worker at all times, as a supervisor would, until stop is
// called; the last one stays.
func (h *host) keepWorker(j job) (stop func()) {
	stopping := make(chan struct{})
	var keeper sync.WaitGroup
	keeper.Go(func() {
		for {
			w := h.newWorker(j)
			select {
			case <-w.Ended():
			case <-stopping:
				return
			}
		}
	})
	return func() { close(stopping); keeper.Wait() }
}

// set changes a key of a model's policy.
func (h *host) set(m testbed.Model, key, value string) {
	h.t.Helper()
	must.Do(h.t, admin.New(h.socket).Set(h.t.Context(), m.Name, map[string]string{key: value}))
}

// workerStats is what the statistics say of a worker.
func (h *host) workerStats(model string, p *proc) (*stats.Worker, error) {
	ws := h.model(model).Workers
	for i := range ws {
		if ws[i].Pid == p.Pid() {
			return &ws[i], nil
		}
	}
	return nil, fmt.Errorf("%s is not attached", p)
}

// client starts one that goes as far as told.
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

func (h *host) stats() *stats.Broker {
	h.t.Helper()
	return statsOf(h.t, h.socket)
}

// model is the statistics of one model, zero if the broker has none of that
// name.
func (h *host) model(name string) stats.Model {
	h.t.Helper()
	return modelOf(h.t, h.socket, name)
}

func statsOf(t *testing.T, socket string) (s *stats.Broker) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	eventually(t, "stats", func() (err error) {
		began := time.Now()
		s, err = admin.New(socket).Stats(ctx)
		// Those that left may not have been noticed.
		if err != nil && !errors.Is(err, status.ErrTooManyConnections) && !errors.Is(err, status.ErrNoDescriptors) && !tookTooLong(began) {
			t.Fatalf("stats: %v", err)
		}
		return err
	})
	return s
}

// tookTooLong says that a call to the broker, which has 10 seconds to answer, was
// given up for that: this machine stood still.
func tookTooLong(began time.Time) bool { return time.Since(began) >= 10*time.Second }

func modelOf(t *testing.T, socket, name string) stats.Model {
	t.Helper()
	if m := statsOf(t, socket).Model(name); m != nil {
		return *m
	}
	return stats.Model{}
}

// eventually waits until f is content.
func (h *host) eventually(what string, f func() error) {
	h.t.Helper()
	eventually(h.t, what, f)
}

func eventually(t *testing.T, what string, f func() error) {
	t.Helper()
	if err := testbed.Eventually(patience, f); err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}

// until waits until the statistics of a model are as expected.
func (h *host) until(what, model string, is func(m stats.Model) bool) {
	h.t.Helper()
	until(h.t, h.socket, what, model, is)
}

func until(t *testing.T, socket, what, model string, is func(m stats.Model) bool) {
	t.Helper()
	eventually(t, what, func() error {
		if m := modelOf(t, socket, model); !is(m) {
			return fmt.Errorf("%+v", m)
		}
		return nil
	})
}

// wait waits for goroutines that send requests; if one never ends, it tells
// what the broker thinks.
func (h *host) wait(wg *sync.WaitGroup) {
	h.t.Helper()
	done := make(chan struct{})
	go func() { wg.Wait(); close(done) }()
	select {
	case <-done:
	case <-time.After(patience):
		text, _ := json.MarshalIndent(h.stats(), "", " ")
		h.t.Fatalf("requests have no end; the broker says\n%s", text)
	}
}

// queued waits until that many requests wait in the broker's queue.
func (h *host) queued(n int) {
	h.t.Helper()
	h.until("the queue's length", "m", func(m stats.Model) bool { return m.QueueLength == n })
}

// settled waits until the broker has no client, and checks that every slot is
// back, every accepted request was ended once, and that the broker holds no
// descriptor, mapping or thread more than before anybody came. Workers that
// are still attached are accounted for.
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

// draining waits until the broker says so.
func (h *host) draining() {
	h.t.Helper()
	h.eventually("it is draining", func() error {
		if !h.stats().Draining {
			return errors.New("not yet")
		}
		return nil
	})
}

// drained expects that the broker finishes what it had accepted, and ends.
func (h *host) drained() {
	h.t.Helper()
	h.broker.expect("drained")
	if err := h.broker.end(); err != nil {
		h.t.Errorf("broker: %v", err)
	}
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

// refused expects that the process's first word is that error, whose text has
// these parts.
func (p *proc) refused(want error, parts ...string) {
	p.t.Helper()
	err := p.Expect("a refusal", nil, patience)
	for _, part := range append(parts, want.Error()) {
		if err == nil || !strings.Contains(err.Error(), part) {
			p.t.Errorf("%s was told %v, not %q", p, err, part)
		}
	}
}

// nonce is unlike any other request's of this process.
var nonce atomic.Int64

// ask runs one request and checks every number of its answer.
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

// asking is a request under way.
type asking chan error

func askLater(ctx context.Context, c *client.Client, cmd, arg int64) asking {
	ch := make(asking, 1)
	go func() { ch <- ask(ctx, c, cmd, arg, 1) }()
	return ch
}

// ends waits for the request's one end and compares it with want, nil being a
// correct answer.
func (a asking) ends(t *testing.T, want error) {
	t.Helper()
	select {
	case err := <-a:
		if !errors.Is(err, want) {
			t.Errorf("request ended with %v, expected %v", err, want)
		}
	case <-time.After(patience):
		t.Fatalf("request has no end, expected %v", want)
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
