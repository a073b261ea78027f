// SPDX-License-Identifier: Apache-2.0

package worker_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/client/ringbatchtest"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/test/testbed"
	"github.com/ringbatch/ringbatch/worker"
)

// patience is how long anything may take here before it counts as stuck.
const patience = 2 * time.Minute

var sig = tensor.Signature{
	Inputs:  []tensor.Spec{{Name: "x", DType: tensor.I32, Shape: []int{2}}},
	Outputs: []tensor.Spec{{Name: "y", DType: tensor.I32, Shape: []int{2}}},
}

// ring is a broker in this process, on heap memory.
type ring struct {
	t      *testing.T
	broker *ringbatchtest.Broker
	socket string
	client *client.Client
}

// newRing has a broker that sends out only full batches, because somebody who
// could join is always attached and silent.
func newRing(t *testing.T, maxBatch int) *ring {
	t.Helper()
	return ringThatWaits(t, maxBatch, time.Hour)
}

// newEagerRing has a broker that sends out small batches too.
func newEagerRing(t *testing.T, maxBatch int) *ring {
	t.Helper()
	return ringThatWaits(t, maxBatch, 200*time.Microsecond)
}

func ringThatWaits(t *testing.T, maxBatch int, wait time.Duration) *ring {
	t.Helper()
	r := &ring{t: t}
	r.broker = testbed.StartOnHeap(t, broker.Config{
		DrainTime: time.Millisecond,
		Models: []broker.ModelConfig{{Name: "m", Signature: sig,
			Policy: policy.New(policy.Slots(128), policy.MaxBatchSize(maxBatch), policy.WaitTime(wait))}},
	})
	r.socket = r.broker.Socket()
	r.dial() // the silent one
	r.client = r.dial()
	return r
}

// restart ends the broker and starts it again with models of that signature.
func (r *ring) restart(s tensor.Signature) {
	r.t.Helper()
	if err := r.broker.Stop(); err != nil {
		r.t.Errorf("broker: %v", err)
	}
	r.broker.Config.Models[0].Signature = s
	must.Do(r.t, r.broker.Start())
}

func (r *ring) dial() *client.Client {
	r.t.Helper()
	c, err := client.Dial(soon(r.t), "m", client.WithSocket(r.socket), client.WithWindow(32))
	must.Do(r.t, err)
	r.t.Cleanup(func() { c.Close() })
	return c
}

func (r *ring) config(depth int) worker.Config {
	return worker.Config{Model: "m", Signature: sig, Socket: r.socket, Depth: depth}
}

func (r *ring) attach(cfg worker.Config) *worker.Worker {
	r.t.Helper()
	w, err := worker.Attach(soon(r.t), cfg)
	must.Do(r.t, err)
	r.t.Cleanup(w.Close)
	return w
}

// within is a context that ends after d.
func within(d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	time.AfterFunc(patience, cancel)
	return ctx
}

// commit sends requests of one row each: i, then i again.
func (r *ring) commit(n int) (reqs []client.Request) {
	r.t.Helper()
	for i := range n {
		req, err := r.client.Claim(soon(r.t), 1)
		must.Do(r.t, err)
		view, _ := req.Input("x")
		x, _ := tensor.As[int32](view)
		x[0], x[1] = int32(i), int32(i)
		must.Do(r.t, req.Commit(context.Background()))
		reqs = append(reqs, req)
	}
	return reqs
}

func soon(t *testing.T) context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	timer := time.AfterFunc(patience, cancel)
	t.Cleanup(func() { timer.Stop(); cancel() })
	return ctx
}

func next(t *testing.T, w *worker.Worker) *worker.Batch {
	t.Helper()
	b, err := w.Next(soon(t))
	must.Do(t, err)
	testbed.Touch(b)
	return b
}

func ends(t *testing.T, req client.Request, want error) {
	t.Helper()
	if err := req.Wait(soon(t)); !errors.Is(err, want) {
		t.Errorf("request ended with %v, expected %v", err, want)
	}
}

func TestTheNextBatchIsThereWhileOneRuns(t *testing.T) {
	r := newRing(t, 2)
	w := r.attach(r.config(2))
	reqs := r.commit(6)
	first, second := next(t, w), next(t, w)
	if first.ID() == second.ID() || first.Len() != 2 || second.Len() != 2 {
		t.Errorf("batches %d of %d and %d of %d", first.ID(), first.Len(), second.ID(), second.Len())
	}
	if b, err := w.Next(ended()); b != nil || !errors.Is(err, context.Canceled) {
		t.Errorf("a third batch for a worker of depth 2: %v", err)
	}
	second.Complete() // in any order
	third := next(t, w)
	first.Complete()
	first.Complete() // once is enough
	third.Complete()
	for _, req := range reqs {
		ends(t, req, nil)
	}
}

func TestNextEndsWithItsContextOrInTime(t *testing.T) {
	r := newRing(t, 2)
	w := r.attach(r.config(1))
	ctx, cancel := context.WithCancel(context.Background())
	time.AfterFunc(20*time.Millisecond, cancel)
	if _, err := w.Next(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("Next: %v", err)
	}
	if _, err := w.Next(within(20 * time.Millisecond)); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Next: %v", err)
	}
}

func TestAWorkerGetsNotesAboutADifferentPolicy(t *testing.T) {
	r := newRing(t, 8)
	notes := func(p ...policy.Setting) []string {
		cfg := r.config(1)
		cfg.Policy = policy.New(p...)
		return r.attach(cfg).Notes()
	}
	if n := append(notes(), notes(policy.MaxBatchSize(8))...); len(n) > 0 {
		t.Errorf("workers that asked for what there is are told %q", n)
	}
	if n := notes(policy.MaxBatchSize(4)); !slices.Equal(n, []string{"max_batch_size is 8, this worker asked for 4"}) {
		t.Errorf("the difference is %q", n)
	}
}

func TestCloseFailsWhatWasTakenAndPassesOnTheRest(t *testing.T) {
	r := newRing(t, 1)
	w := r.attach(r.config(2))
	reqs := r.commit(2)
	next(t, w) // the second is in its mailbox, or will be
	w.Close()
	w.Close()
	if err := reqs[0].Wait(soon(t)); !errors.Is(err, status.ErrFailed) ||
		err.Error() != "the worker was closed before it ran this request" {
		t.Errorf("the taken one: %v", err)
	}
	other := r.attach(r.config(1))
	next(t, other).Complete()
	ends(t, reqs[1], nil)
}

func TestABatchIsSortedBySlotAndShowsItsRuns(t *testing.T) {
	r := newRing(t, 5)
	w := r.attach(r.config(1))
	reqs := r.commit(3)
	gap, err := r.client.Claim(soon(t), 1) // a slot that is not part of the batch
	must.Do(t, err)
	reqs = append(reqs, r.commit(2)...)
	_ = gap.Release()
	b := next(t, w)
	if b.Len() != 5 || b.Rows() != 5 || !slices.IsSorted(b.Slots()) {
		t.Fatalf("%d requests, slots %v", b.Len(), b.Slots())
	}
	runs := b.Runs()
	if len(runs) != 2 || runs[0].Rows != 3 || runs[1].Rows != 2 || runs[1].Row != 3 {
		t.Errorf("runs %v", runs)
	}
	if _, ok := b.Input(0).Contiguous(); ok {
		t.Error("rows with a gap count as one tensor")
	}
	x, err := tensor.As[int32](b.Input(0).Run(0))
	if err != nil || !slices.Equal(x, []int32{0, 0, 1, 1, 2, 2}) {
		t.Errorf("the first run says %v, %v", x, err)
	}
	for i := range b.Rows() {
		copy(worker.Row[int32](b.Output(0), i), []int32{int32(10 + i), int32(10 + i)})
	}
	b.Fail(1, errors.New("just this one"))
	b.Complete()
	for i, req := range reqs {
		if i == 1 {
			ends(t, req, status.ErrFailed)
			continue
		}
		ends(t, req, nil)
		view, err := req.Output("y")
		must.Do(t, err)
		if y, _ := tensor.As[int32](view); y[0] != int32(10+i) {
			t.Errorf("request %d got %v", i, y)
		}
	}
}

func TestPaddingRowsAreZeroAndPrivate(t *testing.T) {
	r := newRing(t, 3)
	cfg := r.config(1)
	cfg.Pad, cfg.PadTo = "fixed", 8
	w := r.attach(cfg)
	reqs := r.commit(3)
	b := next(t, w)
	if b.Rows() != 3 || b.PadTo() != 8 {
		t.Errorf("%d rows padded to %d", b.Rows(), b.PadTo())
	}
	for i := range b.PadTo() {
		x, y := worker.Row[int32](b.Input(0), i), worker.Row[int32](b.Output(0), i)
		if i >= b.Rows() && (x[0] != 0 || x[1] != 0) {
			t.Errorf("padding row %d is %v", i, x)
		}
		y[0], y[1] = x[0]+1, x[1]+1
	}
	if x := worker.Row[int32](b.Input(0), 7); x[0] != 0 {
		t.Errorf("the output's padding is the input's: %v", x)
	}
	for _, i := range []int{-1, b.PadTo()} {
		func() {
			defer func() {
				err, _ := recover().(error)
				must.Fail(t, fmt.Sprint("row ", i), err, status.ErrRows)
			}()
			worker.Row[int32](b.Output(0), i)
		}()
	}
	b.Complete()
	for _, req := range reqs {
		ends(t, req, nil)
	}
}

func TestRowsThatAreLeftOutAreNotPadding(t *testing.T) {
	for _, pad := range []string{"", "fixed"} {
		r := newRing(t, 3)
		cfg := r.config(1)
		if cfg.Pad = pad; pad != "" {
			cfg.PadTo = 3
		}
		w := r.attach(cfg)
		reqs := r.commit(3)
		time.Sleep(50 * time.Millisecond) // the mail is there, not yet read
		must.Do(t, reqs[1].Cancel())
		ends(t, reqs[1], status.ErrCanceled)
		r.commit(1) // fills the batch if the cancelation was quicker after all
		b := next(t, w)
		if want := max(b.Rows(), cfg.PadTo); b.PadTo() != want {
			t.Errorf("pad %q: %d rows padded to %d, expected %d", pad, b.Rows(), b.PadTo(), want)
		}
		b.Complete()
	}
}

func TestAttachNamesWhatIsWrong(t *testing.T) {
	r := newRing(t, 2)
	other := tensor.Signature{Inputs: sig.Inputs, Outputs: []tensor.Spec{{Name: "z", DType: tensor.F32, Shape: []int{1}}}}
	declares := func(s policy.Setting) func(*worker.Config) {
		return func(c *worker.Config) { c.Model, c.Policy = "n", policy.New(policy.Slots(4), s) }
	}
	for _, c := range []struct {
		what   string
		change func(*worker.Config)
		want   error
	}{
		{"no signature", func(c *worker.Config) { c.Signature = tensor.Signature{} }, status.ErrInvalid},
		{"another signature", func(c *worker.Config) { c.Signature = other }, status.ErrSignatureMismatch},
		{"no broker", func(c *worker.Config) { c.Socket += "x" }, status.ErrNoBroker},
		{"negative depth", func(c *worker.Config) { c.Depth = -1 }, status.ErrInvalid},
		{"too much depth", func(c *worker.Config) { c.Depth = shm.MaxMailDepth + 1 }, status.ErrInvalid},
		{"negative concurrency", func(c *worker.Config) { c.Depth, c.Concurrency = 0, -1 }, status.ErrInvalid},
		{"concurrency beyond the depth", func(c *worker.Config) { c.Depth, c.Concurrency = 2, 3 }, status.ErrInvalid},
		{"concurrency beyond any depth", func(c *worker.Config) { c.Depth, c.Concurrency = 0, shm.MaxMailDepth+1 }, status.ErrInvalid},
		{"unknown padding", func(c *worker.Config) { c.Pad = "some" }, status.ErrInvalid},
		{"padding below a batch", func(c *worker.Config) { c.Pad, c.PadTo = "fixed", 1 }, status.ErrInvalid},
		{"no name", func(c *worker.Config) { c.Model = "" }, status.ErrInvalid},
		{"a bad batch size", declares(policy.MaxBatchSize(-1)), status.ErrInvalid},
		{"fewer slots than a batch", declares(policy.MaxBatchSize(8)), status.ErrInvalid},
		{"preferred beyond a batch", declares(policy.PreferredBatchSizes([]int{99})), status.ErrInvalid},
		{"negative lease", declares(policy.Lease(-1)), status.ErrInvalid},
		{"buckets without a variable dimension", declares(policy.Buckets("x", 0, 1)), status.ErrInvalid},
	} {
		cfg := r.config(1)
		c.change(&cfg)
		must.Fail(t, c.what, worker.Serve(soon(t), cfg, nil), c.want)
	}
	if _, err := client.Dial(soon(t), "n", client.WithSocket(r.socket)); !errors.Is(err, status.ErrUnknownModel) {
		t.Errorf("a refused model is there: %v", err)
	}
}

func TestServeFinishesItsBatchAndReturnsNil(t *testing.T) {
	r := newRing(t, 1)
	ctx, cancel := context.WithCancel(context.Background())
	entered, open := make(chan struct{}), make(chan struct{})
	served := make(chan error, 1)
	go func() {
		served <- worker.Serve(ctx, r.config(2), func(_ context.Context, b *worker.Batch) error {
			entered <- struct{}{}
			<-open
			testbed.Touch(b)
			return nil
		})
	}()
	reqs := r.commit(2)
	<-entered
	cancel()
	close(open)
	select {
	case err := <-served:
		must.Check(t, err)
	case <-time.After(patience):
		t.Fatal("Serve does not return")
	}
	ends(t, reqs[0], nil)
	next(t, r.attach(r.config(1))).Complete() // the second went to another
	ends(t, reqs[1], nil)
}

func TestAnErrorOfAWorkerThatRunsOnceFailsWhatHasNotFailedAlready(t *testing.T) {
	r := newRing(t, 3)
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	cfg := r.config(1)
	cfg.RunOnce = true
	go func() {
		served <- worker.Serve(ctx, cfg, func(_ context.Context, b *worker.Batch) error {
			b.Fail(0, errors.New("the first"))
			return fmt.Errorf("all of them")
		})
	}()
	defer func() { cancel(); <-served }()
	for i, req := range r.commit(3) {
		want := map[bool]string{true: "the first", false: "all of them"}[i == 0]
		if err := req.Wait(soon(t)); !errors.Is(err, status.ErrFailed) || err.Error() != want {
			t.Errorf("request %d: %v", i, err)
		}
	}
}

func TestTheReasonOfALateWorkerIsNotRead(t *testing.T) {
	r := newEagerRing(t, 1)
	w := r.attach(r.config(1))
	for d := 50 * time.Millisecond; ; d *= 2 { // until it reaches the worker in time
		ctx, cancel := context.WithTimeout(soon(t), d)
		defer cancel()
		req, err := r.client.Claim(soon(t), 1)
		must.Do(t, err)
		must.Do(t, req.Commit(ctx))
		b, err := w.Next(ctx)
		if err != nil {
			req.Release()
			continue
		}
		b.WriteReason(0, shm.ReasonNoWorker)
		if err := req.Wait(soon(t)); !errors.Is(err, status.ErrExpired) || strings.Contains(err.Error(), shm.ReasonNoWorker) {
			t.Error(err)
		}
		b.Complete()
		return
	}
}

// Its slots hold bytes of an earlier request.
func TestAnOutputThatTheWorkerNeverAskedForFailsTheBatch(t *testing.T) {
	r := newEagerRing(t, 1)
	w := r.attach(r.config(1))
	take := func() *worker.Batch {
		t.Helper()
		b, err := w.Next(soon(t))
		must.Do(t, err)
		return b
	}
	reqs := r.commit(4)
	if err := take().Complete(); err == nil || !strings.Contains(err.Error(), `output "y"`) {
		t.Errorf("Complete: %v", err)
	}
	if err := reqs[0].Wait(soon(t)); !errors.Is(err, status.ErrFailed) || !strings.Contains(err.Error(), `output "y"`) {
		t.Errorf("the request ended with %v", err)
	}
	b := take()
	b.FailAll(errors.New("for another reason"))
	must.Check(t, b.Complete())
	if err := reqs[1].Wait(soon(t)); err == nil || err.Error() != "for another reason" {
		t.Errorf("a request that failed ended with %v", err)
	}
	b = take()
	b.Output(0).Bytes(0)
	must.Check(t, b.Complete())
	ends(t, reqs[2], nil)
	w.Inside().Session() // from here on it may write anywhere
	must.Check(t, take().Complete())
	ends(t, reqs[3], nil)
}
