// SPDX-License-Identifier: Apache-2.0

package admin_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/client/ringbatchtest"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/test/testbed"
	"github.com/ringbatch/ringbatch/worker"
)

const patience = 2 * time.Minute

func soon(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

var signature = func() tensor.Signature {
	s, err := tensor.ParseSignature([]string{"x:f32[4]"}, []string{"y:f32[<=2]"})
	if err != nil {
		panic(err)
	}
	return s
}()

// start runs a broker until the test ends.
func start(t *testing.T, models ...broker.ModelConfig) *ringbatchtest.Broker {
	t.Helper()
	return ringbatchtest.Start(t, broker.Config{Models: models})
}

func attach(t *testing.T, socket, model string) *worker.Worker {
	t.Helper()
	w, err := worker.Attach(soon(t), worker.Config{Model: model, Socket: socket, Signature: signature})
	must.Do(t, err)
	return w
}

func TestModelsAreListedByNameWithSignatureAndPolicy(t *testing.T) {
	socket := start(t, broker.ModelConfig{Name: "b", Signature: signature}, broker.ModelConfig{Name: "a", Signature: signature}).Socket()
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
	a := admin.New(start(t, broker.ModelConfig{Name: "m", Signature: signature}).Socket())
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
	local := start(t, broker.ModelConfig{Name: "m", Signature: signature})
	a := admin.New(local.Socket())
	must.Do(t, local.Stop())
	_, err := a.Ping(soon(t))
	must.Fail(t, "without a broker", err, status.ErrNoBroker)
	must.Do(t, local.Start())
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
	socket := start(t, broker.ModelConfig{Name: "m", Signature: signature}).Socket()
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
	local := start(t)
	a := admin.New(local.Socket())
	known := changesNow(t, a)
	failed := make(chan error, 1)
	ctx := soon(t)
	go func() {
		_, err := a.Changed(ctx, known)
		failed <- err
	}()
	must.Do(t, local.Stop())
	must.Fail(t, "the broker stopped", <-failed, status.ErrBrokerGone, status.ErrNoBroker)
	must.Do(t, local.Start())
	if now, err := a.Changed(soon(t), known); err != nil || now == known {
		t.Errorf("another broker: %d after %d, %v", now, known, err)
	}
}

// A waiting caller has a connection, and gives it back at the end.
func TestACallerThatStopsWaitingLeavesNothingInTheBroker(t *testing.T) {
	b := ringbatchtest.Start(t, broker.Config{MaxClients: 3})
	a := admin.New(b.Socket())
	known := changesNow(t, a)
	for range 4 * 3 {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Millisecond)
		_, err := a.Changed(ctx, known)
		if !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, status.ErrTooManyConnections) {
			t.Errorf("nothing has changed: %v", err)
		}
		cancel()
	}
	must.Do(t, testbed.Eventually(patience, func() error { _, err := a.Ping(soon(t)); return err }))
}

func changesNow(t *testing.T, a *admin.Client) uint64 {
	t.Helper()
	now, err := a.Changed(soon(t), 0)
	must.Do(t, err)
	return now
}
