package client_test

import (
	"context"
	"errors"
	"math"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/worker"
)

// bench is a broker and an echo worker in this process, on heap memory where
// the race detector sees everything.
type bench struct {
	sock       string
	mem        shm.Memory
	stopBroker func()
	gate       chan struct{} // closed: the worker answers
	takes      atomic.Int64  // nanoseconds, for each batch
}

func start(t *testing.T) *bench {
	t.Helper()
	b := &bench{sock: filepath.Join(t.TempDir(), "b.sock"), mem: shm.NewHeap(), gate: make(chan struct{})}
	b.startBroker(t)
	x, _ := tensor.ParseSpec("x:f32[4]")
	y, _ := tensor.ParseSpec("y:f32[4]")
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() {
		cfg := worker.Config{Socket: b.sock, Model: "echo", Memory: b.mem,
			Signature: tensor.Signature{Inputs: []tensor.Spec{x}, Outputs: []tensor.Spec{y}}}
		done <- worker.Serve(ctx, cfg, func(ctx context.Context, batch *worker.Batch) error {
			select {
			case <-b.gate:
			case <-ctx.Done():
			}
			time.Sleep(time.Duration(b.takes.Load()))
			for i := range batch.Rows() {
				copy(batch.Output(0).Bytes(i), batch.Input(0).Bytes(i))
			}
			return nil
		})
	}()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error("worker:", err)
		}
		b.stopBroker()
	})
	return b
}

func (b *bench) startBroker(t *testing.T) {
	t.Helper()
	br, err := broker.New(broker.Config{Socket: b.sock, OpenFolder: true, Memory: b.mem, DrainTime: time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Add(1)
	go func() { defer wg.Done(); _ = br.Serve(ctx) }()
	b.stopBroker = func() { cancel(); wg.Wait() }
}

func (b *bench) dial(t *testing.T) *client.Client {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	c, err := client.Dial(ctx, "echo", client.WithSocket(b.sock), client.WithMemory(b.mem), client.WithWindow(70), client.WaitForModel())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.ReleaseAll(); c.Close() })
	return c
}

func submit(t *testing.T, c *client.Client, v float32) client.Request {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	r, err := c.Claim(ctx, 1)
	if err != nil {
		t.Fatal(err)
	}
	in, _ := r.Input("x")
	x, _ := tensor.As[float32](in)
	x[0] = v
	if err := errors.Join(r.Notify(), r.CommitUntil(0)); err != nil {
		t.Fatal(err)
	}
	return r
}

// collect reaps until want requests were told.
func collect(t *testing.T, n *client.Notifier, want int) []uint64 {
	t.Helper()
	var all []uint64
	for len(all) < want {
		p := []unix.PollFd{{Fd: int32(n.FD()), Events: unix.POLLIN}}
		if got, err := unix.Poll(p, 10_000); err != nil && !errors.Is(err, unix.EINTR) || got == 0 && err == nil {
			t.Fatalf("%d of %d requests were told, then nothing: %v", len(all), want, err)
		}
		all = append(all, n.Reap(make([]uint64, 0, 16))...)
	}
	return all
}

func TestNotifierTellsEveryEndOnce(t *testing.T) {
	b := start(t)
	close(b.gate)
	c := b.dial(t)
	n, err := c.Notifier()
	if err != nil {
		t.Fatal(err)
	}
	for round := range 50 {
		want := map[uint64]float32{}
		for i := range 70 {
			v := float32(round*70 + i)
			want[submit(t, c, v).ID()] = v
		}
		for _, id := range collect(t, n, 70) {
			r := c.RequestByID(id)
			switch round % 3 { // it has ended for whatever comes first
			case 0:
				err = r.Poll()
			case 1:
				_, err = r.Timing()
			}
			if err != nil {
				t.Fatal(err)
			}
			out, err := r.Output("y")
			if err != nil {
				t.Fatal(err)
			}
			if y, _ := tensor.As[float32](out); y[0] != want[id] {
				t.Fatalf("request %x: got %v, want %v", id, y[0], want[id])
			}
			delete(want, id)
			if err := r.Release(); err != nil {
				t.Fatal(err)
			}
			if err := c.RequestByID(id).Poll(); !errors.Is(err, client.ErrReleased) {
				t.Fatalf("a released number is %v", err)
			}
		}
		if len(want) != 0 {
			t.Fatalf("never told: %v", want)
		}
	}
}

func TestWaitersAndNotifierShareAClient(t *testing.T) {
	b := start(t)
	close(b.gate)
	c := b.dial(t)
	ctx := context.Background()
	var wg sync.WaitGroup
	for range 4 { // some of them lead when the notifier comes
		wg.Add(1)
		go func() {
			defer wg.Done()
			for range 200 {
				if _, err := c.Infer(ctx, []float32{1, 2, 3, 4}); err != nil {
					t.Error(err)
					return
				}
			}
		}()
	}
	time.Sleep(time.Millisecond)
	n, err := c.Notifier()
	if err != nil {
		t.Fatal(err)
	}
	for range 50 {
		for range 8 {
			submit(t, c, 1)
		}
		for _, id := range collect(t, n, 8) {
			if err := c.RequestByID(id).Release(); err != nil {
				t.Error(err)
			}
		}
	}
	wg.Wait()
}

func TestBrokerGoneIsToldToo(t *testing.T) {
	b := start(t)
	c := b.dial(t)
	n, err := c.Notifier()
	if err != nil {
		t.Fatal(err)
	}
	for range 10 {
		submit(t, c, 1)
	}
	b.stopBroker()
	for _, id := range collect(t, n, 10) {
		r := c.RequestByID(id)
		// What it had not read yet when it was told to stop ends with Draining.
		if err := r.Poll(); !errors.Is(err, client.ErrBrokerGone) && !errors.Is(err, client.ErrDraining) {
			t.Error(err)
		}
		if err := r.Release(); err != nil {
			t.Error(err)
		}
	}
	close(b.gate)
	b.startBroker(t)
	r := submit(t, c, 7) // over the next attachment
	if got := collect(t, n, 1); got[0] != r.ID() {
		t.Errorf("told %x, submitted %x", got[0], r.ID())
	}
	if err := errors.Join(r.Poll(), r.Release()); err != nil {
		t.Error(err)
	}
}

func TestWaitForEndsInTimeAndTheRequestGoesOn(t *testing.T) {
	b := start(t)
	c := b.dial(t)
	r, err := c.TryClaim(1)
	if err != nil {
		t.Fatal(err)
	}
	if err := r.CommitUntil(0); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for range 3 { // one leads, the others follow
		q, err := c.TryClaim(1)
		if err != nil {
			t.Fatal(err)
		}
		if err := q.CommitUntil(0); err != nil {
			t.Fatal(err)
		}
		wg.Add(1)
		go func() {
			defer wg.Done()
			if err := q.WaitFor(20 * time.Millisecond); !errors.Is(err, client.ErrTimeout) {
				t.Error(err)
			}
		}()
	}
	wg.Wait()
	longest := make(chan error)
	go func() { longest <- r.WaitFor(math.MaxInt64) }() // no clock goes that far
	close(b.gate)
	if err := <-longest; err != nil {
		t.Error(err)
	}
	if err := r.WaitFor(10 * time.Second); err != nil {
		t.Error(err)
	}
}

func TestCancelEndsARequestThatWaits(t *testing.T) {
	b := start(t)
	c := b.dial(t)
	for range 50 { // the worker is stuck, so all of them can only be canceled
		r, err := c.TryClaim(1)
		if err != nil {
			t.Fatal(err)
		}
		if err := r.Cancel(); !errors.Is(err, client.ErrNotCommitted) {
			t.Fatal(err)
		}
		if err := errors.Join(r.CommitUntil(0), r.Cancel(), r.Cancel()); err != nil {
			t.Fatal(err)
		}
		if err := r.WaitFor(10 * time.Second); !errors.Is(err, client.ErrCanceled) {
			t.Fatal(err)
		}
		if err := r.Release(); err != nil {
			t.Fatal(err)
		}
	}
	close(b.gate)
}

func TestManyCancelsDoNotFlood(t *testing.T) {
	b := start(t)
	close(b.gate)
	c := b.dial(t)
	for range 2000 {
		r, err := c.Claim(context.Background(), 1)
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(r.CommitUntil(0), r.Cancel(), r.Cancel(), r.Cancel(), r.Release()); err != nil {
			t.Fatal(err)
		}
	}
}
