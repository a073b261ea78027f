// SPDX-License-Identifier: Apache-2.0

package worker_test

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/internal/control"
	"github.com/ringbatch/ringbatch/internal/inside"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/test/testbed"
	"github.com/ringbatch/ringbatch/worker"
)

// refusing is a broker that answers every attach in the same way.
func refusing(t *testing.T, reply control.Reply) (socket string, asked *atomic.Int32) {
	t.Helper()
	dir, err := os.MkdirTemp("", "rb")
	must.Do(t, err)
	socket, asked = filepath.Join(dir, "s"), new(atomic.Int32)
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"})
	must.Do(t, err)
	t.Cleanup(func() { l.Close(); os.RemoveAll(dir) })
	go func() {
		for {
			c, err := l.AcceptUnix()
			if err != nil {
				return
			}
			var req control.Request
			fds, _ := control.Receive(c, time.Now().Add(patience), &req)
			control.CloseFDs(fds)
			asked.Add(1)
			_ = control.Send(c, time.Now().Add(patience), &reply)
			c.Close()
		}
	}()
	return socket, asked
}

func TestEveryStatusEndsAWorkerOrIsTriedAgain(t *testing.T) {
	for _, code := range status.All() {
		if code == status.OK {
			continue
		}
		t.Run(code.Name(), func(t *testing.T) {
			t.Parallel()
			socket, asked := refusing(t, control.Reply{Version: control.Version, Code: uint8(code), Message: "no: " + code.Name()})
			ctx, cancel := context.WithCancel(soon(t))
			defer cancel()
			cfg := worker.Config{Model: "m", Signature: sig, Socket: socket, WaitForBroker: 2 * patience}
			served := make(chan error, 1)
			go func() { served <- worker.Serve(ctx, cfg, nil) }()
			if !status.RetryAttach(code) {
				if err := <-served; !errors.Is(err, code) || asked.Load() != 1 {
					t.Errorf("ended with %v after %d tries", err, asked.Load())
				}
				return
			}
			for asked.Load() < 3 && ctx.Err() == nil {
				select {
				case err := <-served:
					t.Fatalf("ended with %v after %d tries", err, asked.Load())
				case <-time.After(time.Millisecond):
				}
			}
			cancel()
			if err := <-served; err != nil {
				t.Errorf("after its context had ended: %v", err)
			}
		})
	}
}

func TestABrokerThatWasNeverThereIsWaitedForAsLongAsAsked(t *testing.T) {
	dir, err := os.MkdirTemp("", "rb")
	must.Do(t, err)
	defer os.RemoveAll(dir)
	cfg := worker.Config{Model: "m", Signature: sig, Socket: filepath.Join(dir, "s"), WaitForBroker: 100 * time.Millisecond}
	for name, try := range map[string]func() error{
		"Serve":  func() error { return worker.Serve(soon(t), cfg, nil) },
		"Attach": func() error { _, err := worker.Attach(soon(t), cfg); return err },
	} {
		began := time.Now()
		if err := try(); !errors.Is(err, status.ErrNoBroker) || time.Since(began) < cfg.WaitForBroker/2 {
			t.Errorf("%s after %v: %v", name, time.Since(began), err)
		}
	}
}

// A worker attaches again to a restarted broker, unless the broker has another signature of
// the model.
func TestAWorkerOutlastsARestartAndEndsWhenItsModelBecameAnother(t *testing.T) {
	r := newEagerRing(t, 1)
	served := make(chan error, 1)
	go func() {
		served <- worker.Serve(soon(t), r.config(1), func(_ context.Context, b *worker.Batch) error { testbed.Touch(b); return nil })
	}()
	for range 3 {
		c := r.dial()
		if _, err := c.Infer(soon(t), []int32{1, 2}); err != nil {
			t.Error(err)
		}
		c.Close()
		r.restart(sig)
	}
	r.restart(tensor.Signature{Inputs: sig.Inputs, Outputs: []tensor.Spec{{Name: "z", DType: tensor.F32, Shape: []int{1}}}})
	if err := <-served; !errors.Is(err, status.ErrSignatureMismatch) {
		t.Errorf("ended with %v", err)
	}
}

func TestAnAbandonedBatchIsNotAnswered(t *testing.T) {
	r := newRing(t, 1)
	var w *worker.Worker
	lost := errors.New("lost")
	reqs := r.commit(1)
	err := worker.KeepAttached(soon(t), r.config(1), func(ctx context.Context, attached *worker.Worker) error {
		w = attached
		next(t, w)
		inside.Of(ctx).Abandon()
		return lost
	})
	if !errors.Is(err, lost) {
		t.Errorf("KeepAttached: %v", err)
	}
	must.Fail(t, "it was answered", reqs[0].Wait(ended()), context.Canceled)
	w.Inside().Leave() // for this test; else only the end of the process would free it
	ends(t, reqs[0], status.ErrFailed)
}

// ended is a context that has.
func ended() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}
