// SPDX-License-Identifier: Apache-2.0

package weights_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/admin/stats"
	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/test/testbed"
	"github.com/ringbatch/ringbatch/worker"
	"github.com/ringbatch/ringbatch/worker/weights"
)

// rig serves the model "m", whose answer is the least and the most of its weights.
type rig struct {
	t      *testing.T
	broker *testbed.Local
	model  broker.ModelConfig
	mem    *shm.Heap
	specs  []tensor.Spec
}

func newRig(t *testing.T) *rig {
	t.Helper()
	sig, err := tensor.ParseSignature([]string{"x:u8[1]"}, []string{"least:i64[1]", "most:i64[1]"})
	must.Do(t, err)
	r := &rig{t: t, mem: shm.NewHeap(), model: broker.ModelConfig{Name: "m", Signature: sig}}
	r.specs, err = tensor.ParseSpecs([]string{"a:i64[600]", "b.c:i64[]"}, nil)
	must.Do(t, err)
	r.broker, err = testbed.StartLocal(broker.Config{Memory: r.mem, Models: []broker.ModelConfig{r.model}, DrainTime: time.Millisecond})
	must.Do(t, err)
	t.Cleanup(func() { must.Check(t, r.broker.Close()) })
	return r
}

func (r *rig) options() []weights.Option {
	return []weights.Option{weights.WithSocket(r.broker.Socket()), weights.WithMemory(r.mem)}
}

func (r *rig) publisher() *weights.Publisher {
	r.t.Helper()
	var p *weights.Publisher
	must.Do(r.t, testbed.Eventually(time.Minute, func() (err error) { // the broker may not know yet that the one before is gone
		p, err = weights.NewPublisher(soon(r.t), "m", r.specs, r.options()...)
		return err
	}))
	r.t.Cleanup(func() { p.Close() })
	return p
}

// publish fills all weights with a number.
func publish(t *testing.T, p *weights.Publisher, fill int64) (shm.Version, error) {
	t.Helper()
	b, err := p.Begin(soon(t))
	must.Do(t, err)
	for k := range 2 {
		for at := b.Tensor(k); len(at) > 0; at = at[8:] {
			binary.NativeEndian.PutUint64(at, uint64(fill))
		}
	}
	return p.Publish(b)
}

// work serves with the views of each batch; it refuses weights below 0.
func (r *rig) work() (leave func()) {
	r.t.Helper()
	f, err := weights.Follow(soon(r.t), "m", func(v weights.View) error {
		if int64(binary.NativeEndian.Uint64(v.Tensor(0))) < 0 {
			return errors.New("weights below 0")
		}
		return nil
	}, r.options()...)
	must.Do(r.t, err)
	end := testbed.ServeLocal(worker.Config{Model: "m", Signature: r.model.Signature, Socket: r.broker.Socket(), Memory: r.mem,
		Weights: f, Concurrency: 2}, answerWeights)
	leave = sync.OnceFunc(func() {
		must.Check(r.t, end())
		f.Close()
	})
	r.t.Cleanup(leave)
	return leave
}

func answerWeights(_ context.Context, b *worker.Batch) error {
	v := b.Weights()
	least, most := int64(1)<<62, int64(-1)<<62
	for range 2 { // a writer beside it would be seen
		for k := range 2 {
			for at := v.Tensor(k); len(at) > 0; at = at[8:] {
				x := int64(binary.NativeEndian.Uint64(at))
				least, most = min(least, x), max(most, x)
			}
		}
	}
	for row := range b.Rows() {
		worker.Row[int64](b.Output(0), row)[0] = least
		worker.Row[int64](b.Output(1), row)[0] = most
	}
	return nil
}

func (r *rig) dial() *client.Client {
	r.t.Helper()
	c, err := client.Dial(soon(r.t), "m", client.WithSocket(r.broker.Socket()), client.WithMemory(r.mem))
	must.Do(r.t, err)
	r.t.Cleanup(func() { c.Close() })
	return c
}

// ask returns the version of an answer, and the number that its weights were filled with.
func ask(ctx context.Context, c *client.Client) (v shm.Version, fill int64, err error) {
	req, err := c.Fill(ctx, []uint8{1})
	if err != nil {
		return 0, 0, err
	}
	defer req.Release()
	if err = req.Commit(ctx); err == nil {
		err = req.Wait(ctx)
	}
	if err != nil {
		return 0, 0, err
	}
	least, _ := req.OutputBytes(0)
	most, _ := req.OutputBytes(1)
	fill = int64(binary.NativeEndian.Uint64(least))
	if other := int64(binary.NativeEndian.Uint64(most)); other != fill {
		return 0, 0, fmt.Errorf("torn: %d and %d", fill, other)
	}
	v, err = req.Version()
	return v, fill, err
}

func expect(t *testing.T, c *client.Client, version shm.Version, fill int64) {
	t.Helper()
	if v, f, err := ask(soon(t), c); err != nil || v != version || f != fill {
		t.Errorf("version %d with %d, %v; not version %d with %d", v, f, err, version, fill)
	}
}

func (r *rig) stats() stats.Weights {
	r.t.Helper()
	s, err := admin.New(r.broker.Socket()).Stats(soon(r.t))
	must.Do(r.t, err)
	if len(s.Weights) != 1 {
		r.t.Fatalf("%+v", s.Weights)
	}
	return s.Weights[0]
}

// soon ends a stuck test.
func soon(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

func TestAnAnswerHasTheVersionThatWasPublishedBeforeIt(t *testing.T) {
	r := newRig(t)
	p := r.publisher()
	_, err := weights.NewPublisher(soon(t), "m", r.specs, r.options()...)
	must.Fail(t, "a second publisher", err, status.ErrBusy)
	if v, err := publish(t, p, 10); v != 1 || err != nil {
		t.Fatal(v, err)
	}
	r.work()
	c := r.dial()
	expect(t, c, 1, 10)
	for i := range int64(50) {
		v, err := publish(t, p, 20+i)
		must.Do(t, err)
		expect(t, c, v, 20+i)
	}
	p.Close()
	expect(t, c, 51, 69)
	successor := r.publisher()
	v, err := publish(t, successor, 100) // goes on with the numbers
	must.Do(t, err)
	expect(t, c, 52, 100)
	recording := make(chan error, 1)
	var trace *stats.Trace
	go func() {
		var err error
		trace, err = admin.New(r.broker.Socket()).Trace(soon(t), "m", 100*time.Millisecond)
		recording <- err
	}()
	for {
		expect(t, c, 52, 100)
		select {
		case err := <-recording:
			if must.Do(t, err); len(trace.Requests) == 0 || trace.Requests[0].Version != 52 {
				t.Errorf("%+v", trace.Requests)
			}
		default:
			continue
		}
		break
	}
	if s := r.stats(); s.Version != 52 || s.Last != 52 || len(s.Followers) != 1 || s.Followers[0].Version != uint32(v) {
		t.Errorf("%+v", s)
	}
}

func TestAVersionThatCannotBeLoadedIsWithdrawn(t *testing.T) {
	r := newRig(t)
	p := r.publisher()
	_, err := publish(t, p, 1)
	must.Do(t, err)
	r.work()
	c := r.dial()
	expect(t, c, 1, 1)
	bad, err := publish(t, p, -1)
	must.Do(t, err)
	expect(t, c, 1, 1) // the one before
	r.work()           // a worker that comes now has it, too
	expect(t, c, 1, 1)
	_, err = publish(t, p, 3)
	if must.Fail(t, "the next publish", err, status.ErrFailed); r.stats().Withdrawn != uint32(bad) {
		t.Errorf("%+v", r.stats())
	}
	v, err := publish(t, p, 3)
	must.Do(t, err)
	expect(t, c, v, 3)
	must.Do(t, admin.New(r.broker.Socket()).Withdraw(soon(t), "m", uint32(v)))
	expect(t, c, 1, 1)
	must.Fail(t, "twice", admin.New(r.broker.Socket()).Withdraw(soon(t), "m", uint32(v)), status.ErrInvalid)
}

func TestAWithdrawalIsHeardAlsoIfALaterVersionIsThere(t *testing.T) {
	r := newRig(t)
	p := r.publisher()
	_, err := publish(t, p, 1)
	must.Do(t, err)
	loading, refuse := make(chan struct{}, 8), make(chan struct{})
	f, err := weights.Follow(soon(t), "m", func(v weights.View) error {
		if v.Version != 2 {
			return nil
		}
		loading <- struct{}{}
		<-refuse
		return errors.New("not this one")
	}, r.options()...)
	must.Do(t, err)
	defer f.Close()
	_, err = publish(t, p, 2)
	must.Do(t, err)
	entered := make(chan error)
	go func() {
		_, err := f.Enter()
		entered <- err
	}()
	<-loading
	_, err = publish(t, p, 3)
	must.Do(t, err)
	close(refuse)
	must.Do(t, <-entered)
	f.Exit()
	_, err = publish(t, p, 4)
	if must.Fail(t, "the next publish", err, status.ErrFailed); !strings.Contains(err.Error(), "version 2") {
		t.Error(err)
	}
	v, err := publish(t, p, 4)
	must.Do(t, err)
	p.Close()
	if next, err := publish(t, r.publisher(), 5); err != nil || next != v+1 {
		t.Errorf("a successor: version %d, %v", next, err)
	}
}

// A restarted broker that refuses the weights is no absent broker.
func TestAPublisherHearsWhyItMayNotComeBack(t *testing.T) {
	r := newRig(t)
	p := r.publisher()
	_, err := publish(t, p, 1)
	must.Do(t, err)
	must.Do(t, r.broker.Stop())
	r.broker.Config.Limits.MaxUserBytes = 4096
	must.Do(t, r.broker.Start())
	must.Do(t, testbed.Eventually(time.Minute, func() error {
		b, err := p.Begin(soon(t))
		if err == nil {
			_, err = p.Publish(b)
		}
		if !errors.Is(err, status.ErrQuota) {
			return fmt.Errorf("want Quota, got %v", err)
		}
		return nil
	}))
}

func TestWorkersServeOnWhileTheBrokerIsRestarted(t *testing.T) {
	r := newRig(t)
	p := r.publisher()
	for i := range int64(3) {
		_, err := publish(t, p, i)
		must.Do(t, err)
	}
	r.work()
	c := r.dial()
	expect(t, c, 3, 2)
	b, err := p.Begin(soon(t))
	must.Do(t, err)
	must.Do(t, r.broker.Stop())
	must.Do(t, r.broker.Start())
	must.Do(t, testbed.Eventually(time.Minute, func() error {
		v, fill, err := ask(soon(t), c)
		if err == nil && (v != 3 || fill != 2) {
			t.Errorf("version %d with %d", v, fill)
		}
		return err
	}))
	r.work() // waits until the publisher has published it again
	expect(t, c, 3, 2)
	for k := range 2 {
		clear(b.Tensor(k))
	}
	v, err := p.Publish(b) // a buffer of before
	must.Do(t, err)
	must.Do(t, testbed.Eventually(time.Minute, func() error {
		if got, fill, err := ask(soon(t), c); err != nil || got != v || fill != 0 {
			return fmt.Errorf("%d %d %v", got, fill, err)
		}
		return nil
	}))
}

func TestOtherTensorsWaitForTheLastFollower(t *testing.T) {
	r := newRig(t)
	p := r.publisher()
	_, err := publish(t, p, 1)
	must.Do(t, err)
	leave := r.work()
	p.Close()
	others, err := tensor.ParseSpecs([]string{"a:i64[601]"}, nil)
	must.Do(t, err)
	attach := func() error {
		p, err := weights.NewPublisher(soon(t), "m", others, r.options()...)
		if err == nil {
			p.Close()
		}
		return err
	}
	must.Do(t, testbed.Eventually(time.Minute, func() error {
		if err := attach(); !errors.Is(err, status.ErrSignatureMismatch) {
			return fmt.Errorf("while a worker follows: %v", err)
		}
		return nil
	}))
	leave()
	must.Do(t, testbed.Eventually(time.Minute, attach))
}

func TestNoAnswerIsTornOrOlderThanPromised(t *testing.T) {
	r := newRig(t)
	p := r.publisher()
	_, err := publish(t, p, 1)
	must.Do(t, err)
	r.work()
	r.work()
	ctx, cancel := context.WithCancel(soon(t))
	var published atomic.Uint32
	published.Store(1)
	var clients sync.WaitGroup
	for range 4 {
		c := r.dial()
		clients.Go(func() {
			for ctx.Err() == nil {
				least := shm.Version(published.Load())
				v, fill, err := ask(soon(t), c)
				if err != nil || v < least || fill != int64(v) {
					t.Errorf("version %d with %d, %v; published was %d", v, fill, err, least)
					return
				}
			}
		})
	}
	for range 300 {
		v, err := publish(t, p, int64(published.Load())+1)
		must.Do(t, err)
		published.Store(uint32(v))
		time.Sleep(time.Millisecond)
	}
	cancel()
	clients.Wait()
}

func TestWithoutAVersionBatchesFailUntilTheNextPublish(t *testing.T) {
	r := newRig(t)
	p := r.publisher()
	_, err := publish(t, p, 1)
	must.Do(t, err)
	r.work()
	c := r.dial()
	expect(t, c, 1, 1)
	must.Do(t, admin.New(r.broker.Socket()).Withdraw(soon(t), "m", 1))
	_, _, err = ask(soon(t), c)
	if must.Fail(t, "without a version", err, status.ErrFailed); !strings.Contains(err.Error(), "withdrawn by hand") {
		t.Error(err)
	}
	_, err = publish(t, p, 2)
	must.Fail(t, "the next publish", err, status.ErrFailed)
	v, err := publish(t, p, 2)
	must.Do(t, err)
	expect(t, c, v, 2)
}

func TestAClosedPublisherOrFollowerSaysSo(t *testing.T) {
	r := newRig(t)
	p := r.publisher()
	_, err := publish(t, p, 1)
	must.Do(t, err)
	f, err := weights.Follow(soon(t), "m", func(weights.View) error { return nil }, r.options()...)
	must.Do(t, err)
	buffer, err := p.Begin(soon(t))
	must.Do(t, err)
	must.Do(t, errors.Join(p.Close(), f.Close(), p.Close(), f.Close()))
	_, err = p.Begin(soon(t))
	must.Fail(t, "Begin", err, status.ErrClosed)
	_, err = p.Publish(buffer)
	must.Fail(t, "Publish", err, status.ErrClosed)
	_, err = f.Enter()
	must.Fail(t, "Enter", err, status.ErrClosed)
}

func TestTwoWorkersThatCannotLoadAVersionGoOnWithTheOneBefore(t *testing.T) {
	r := newRig(t)
	p := r.publisher()
	_, err := publish(t, p, 1)
	must.Do(t, err)
	met := make(chan struct{}, 2)
	follow := func() *weights.Follower {
		f, err := weights.Follow(soon(t), "m", func(v weights.View) error {
			if v.Version == 1 {
				return nil
			}
			met <- struct{}{} // both load it before one refuses it
			for len(met) < 2 {
				runtime.Gosched()
			}
			return errors.New("no")
		}, r.options()...)
		must.Do(t, err)
		t.Cleanup(func() { f.Close() })
		return f
	}
	var both sync.WaitGroup
	for _, f := range []*weights.Follower{follow(), follow()} {
		both.Go(func() {
			for {
				v, err := f.Enter()
				if err != nil || v.Version != 1 {
					t.Errorf("version %d: %v", v.Version, err)
					return
				}
				f.Exit()
				if len(met) == 2 {
					return
				}
			}
		})
	}
	_, err = publish(t, p, 2)
	must.Do(t, err)
	both.Wait()
}

// A stopped publisher comes back after a restart of the broker, and another one was first.
func TestAPublisherHearsThatAnotherOneTookItsPlace(t *testing.T) {
	r := newRig(t)
	first := r.publisher()
	for i := range int64(3) {
		_, err := publish(t, first, i)
		must.Do(t, err)
	}
	r.work()
	f, err := weights.Follow(soon(t), "m", func(weights.View) error { return nil }, r.options()...)
	must.Do(t, err)
	defer f.Close()
	view, err := f.Enter() // a batch that runs
	must.Do(t, err)
	before := bytes.Clone(view.Tensor(0))
	must.Do(t, r.broker.Stop())
	for i := range int64(10) { // without a broker the publisher goes on
		_, err := publish(t, first, 100+i)
		must.Do(t, err)
	}
	if !bytes.Equal(before, view.Tensor(0)) {
		t.Error("the weights of a running batch have changed")
	}
	f.Exit()
	var second *weights.Publisher
	for { // until the other one is the first to attach
		must.Do(t, r.broker.Start())
		if second, err = weights.NewPublisher(soon(t), "m", r.specs, r.options()...); err == nil {
			break
		}
		must.Fail(t, "the second", err, status.ErrBusy)
		must.Do(t, r.broker.Stop())
	}
	must.Do(t, testbed.Eventually(time.Minute, func() error {
		if _, err := first.Begin(soon(t)); !errors.Is(err, status.ErrBusy) {
			return fmt.Errorf("it goes on: %v", err)
		}
		return nil
	}))
	v, err := publish(t, second, 50)
	must.Do(t, err)
	second.Close()
	c := r.dial()
	must.Do(t, testbed.Eventually(time.Minute, func() error { // its worker may not have attached again yet
		if got, fill, err := ask(soon(t), c); err != nil || got != v || fill != 50 {
			return fmt.Errorf("version %d with %d: %v", got, fill, err)
		}
		return nil
	}))
	must.Do(t, testbed.Eventually(time.Minute, func() error { _, err := first.Begin(soon(t)); return err }))
	v, err = publish(t, first, 60)
	must.Do(t, err)
	expect(t, c, v, 60)
	if v < 14 {
		t.Errorf("version %d after 13 of its own", v)
	}
}
