// SPDX-License-Identifier: Apache-2.0

package admin_test

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/worker"
)

const patience = 2 * time.Minute

func soon(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

// socketOf is a path in a folder that a broker takes.
func socketOf(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "rb") // t.TempDir is too long for a socket
	must.Do(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return filepath.Join(dir, "broker.sock")
}

var signature = func() tensor.Signature {
	s, err := tensor.ParseSignature([]string{"x:f32[4]"}, []string{"y:f32[<=2]"})
	if err != nil {
		panic(err)
	}
	return s
}()

// start runs a broker; the function ends it.
func start(t *testing.T, socket string, models ...broker.ModelConfig) (stop func()) {
	t.Helper()
	b, err := broker.New(broker.Config{Socket: socket, Models: models, Logger: slog.New(slog.DiscardHandler)})
	must.Do(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- b.Serve(ctx) }()
	stopped := false
	stop = func() {
		if !stopped {
			stopped = true
			cancel()
			must.Check(t, <-served)
		}
	}
	t.Cleanup(stop)
	return stop
}

func attach(t *testing.T, socket, model string) *worker.Worker {
	t.Helper()
	w, err := worker.Attach(soon(t), worker.Config{Model: model, Socket: socket, Signature: signature})
	must.Do(t, err)
	return w
}

func TestModelsAreListedByNameWithSignatureAndPolicy(t *testing.T) {
	socket := socketOf(t)
	start(t, socket, broker.ModelConfig{Name: "b", Signature: signature}, broker.ModelConfig{Name: "a", Signature: signature})
	defer attach(t, socket, "b").Close()
	a := admin.New(socket)
	must.Do(t, a.Set(soon(t), "b", map[string]string{"wait_time": "7ms", "max_queue": "9"}))
	list, err := a.Models(soon(t))
	if err != nil || len(list) != 2 || list[0].Name != "a" || list[1].Name != "b" {
		t.Fatalf("%v, %+v", err, list)
	}
	m := list[1]
	if !m.Signature.Equal(&signature) || m.Workers != 1 || m.Clients != 0 {
		t.Errorf("%+v", m)
	}
	if m.Policy["wait_time"] != "7ms" {
		t.Errorf("policy %v", m.Policy)
	}
}

func TestSettingsAreTakenWholeOrNotAtAll(t *testing.T) {
	socket := socketOf(t)
	start(t, socket, broker.ModelConfig{Name: "m", Signature: signature})
	a := admin.New(socket)
	before, err := a.Models(soon(t))
	must.Do(t, err)
	must.Fail(t, "an unknown key", a.Set(soon(t), "m", map[string]string{"wait_time": "7ms", "no_such_key": "1"}), status.ErrInvalid)
	must.Fail(t, "an unknown model", a.Set(soon(t), "no such model", map[string]string{"wait_time": "7ms"}), status.ErrUnknownModel)
	after, err := a.Models(soon(t))
	if err != nil || after[0].Policy["wait_time"] != before[0].Policy["wait_time"] {
		t.Errorf("%v, %v", err, after)
	}
}

func TestPingAndStatsTellWhoAnswers(t *testing.T) {
	socket := socketOf(t)
	a := admin.New(socket)
	if _, err := a.Ping(soon(t)); !errors.Is(err, status.ErrNoBroker) {
		t.Errorf("without a broker: %v", err)
	}
	start(t, socket, broker.ModelConfig{Name: "m", Signature: signature})
	b, err := a.Ping(soon(t))
	must.Do(t, err)
	s, err := a.Stats(soon(t))
	if err != nil || s.Pid != b.Pid || s.Epoch != b.Epoch || s.Socket != a.Socket() {
		t.Errorf("%v, %+v, %+v", err, b, s)
	}
	if s.Model("m") == nil || s.Model("other") != nil {
		t.Errorf("models %+v", s.Models)
	}
}

// watcher counts changes one by one.
type watcher struct {
	t     *testing.T
	a     *admin.Client
	known uint64
}

// during fails unless a change is seen that f makes.
func (w *watcher) during(what string, f func()) {
	w.t.Helper()
	type result struct {
		now uint64
		err error
	}
	seen := make(chan result, 1)
	ctx := soon(w.t)
	go func() {
		now, err := w.a.Changed(ctx, w.known)
		seen <- result{now, err}
	}()
	f()
	r := <-seen
	if r.err != nil {
		w.t.Fatalf("%s: %v", what, r.err)
	}
	w.known = r.now
}

func (w *watcher) nothingMore(what string) {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	if now, err := w.a.Changed(ctx, w.known); !errors.Is(err, context.DeadlineExceeded) {
		w.t.Errorf("%s: the count is %d, was %d (%v)", what, now, w.known, err)
	}
}

func TestAChangeOfTheModelsEndsTheWait(t *testing.T) {
	socket := socketOf(t)
	start(t, socket, broker.ModelConfig{Name: "m", Signature: signature})
	w := &watcher{t: t, a: admin.New(socket)}
	w.during("the first call returns at once", func() {})
	w.nothingMore("nothing has happened")

	var first, second *worker.Worker
	w.during("the first worker", func() { first = attach(t, socket, "m") })
	second = attach(t, socket, "m")
	first.Close()
	w.nothingMore("a second worker came, the first one left")
	w.during("the last worker left", func() { second.Close() })

	var other *worker.Worker
	w.during("a worker declares a model", func() { other = attach(t, socket, "n") })
	// The model and its first worker are two changes, which may be seen as one.
	w.known = changesNow(t, w.a)
	w.during("it goes with its last worker", func() { other.Close() })
}

func TestAWaitEndsWithItsBrokerAndTheNextBrokerCountsOtherwise(t *testing.T) {
	socket := socketOf(t)
	stop := start(t, socket)
	a := admin.New(socket)
	known := changesNow(t, a)
	failed := make(chan error, 1)
	ctx := soon(t)
	go func() {
		_, err := a.Changed(ctx, known)
		failed <- err
	}()
	stop()
	if err := <-failed; !errors.Is(err, status.ErrBrokerGone) && !errors.Is(err, status.ErrNoBroker) {
		t.Errorf("the broker stopped: %v", err)
	}
	start(t, socket)
	if now, err := a.Changed(soon(t), known); err != nil || now == known {
		t.Errorf("another broker: %d after %d, %v", now, known, err)
	}
}

// One who waits is one connection, and gives it back when it goes.
func TestWhoStopsWaitingLeavesNothingInTheBroker(t *testing.T) {
	socket := socketOf(t)
	b, err := broker.New(broker.Config{Socket: socket, MaxClients: 3, Logger: slog.New(slog.DiscardHandler)})
	must.Do(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- b.Serve(ctx) }()
	defer func() { cancel(); <-served }()
	a := admin.New(socket)
	known := changesNow(t, a)
	for range 4 * 3 {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Millisecond)
		_, err := a.Changed(ctx, known)
		// those before may not have been noticed to be gone
		if !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, status.ErrTooManyConnections) {
			t.Errorf("nothing has changed: %v", err)
		}
		cancel()
	}
	end := time.Now().Add(patience)
	for {
		if _, err = a.Ping(soon(t)); err == nil {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("%v", err)
		}
	}
}

func changesNow(t *testing.T, a *admin.Client) uint64 {
	t.Helper()
	now, err := a.Changed(soon(t), 0)
	must.Do(t, err)
	return now
}
