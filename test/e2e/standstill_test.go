// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/test/testbed"
	"github.com/ringbatch/ringbatch/worker"
)

// The broker is stopped for the whole test, so only the caller's deadline ends a call.
func TestDeadlinesAreKeptWhileTheBrokerStandsStill(t *testing.T) {
	h := newHost(t, theModel)
	const window = 6
	c := h.dial(client.WithWindow(window))
	other := h.dial()
	w, err := worker.Attach(background(t), theModel.WorkerConfig(h.socket))
	must.Do(t, err)
	must.Do(t, testbed.Freeze(h.broker.Pid(), time.Minute))
	defer h.broker.Signal(syscall.SIGCONT)
	soon := func() context.Context {
		ctx, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
		t.Cleanup(cancel)
		return ctx
	}
	claim := func(deadline time.Time) client.Request {
		t.Helper()
		r, err := c.Claim(background(t), 1)
		if err == nil {
			err = r.SetDeadline(deadline)
		}
		if err == nil {
			err = r.Commit(context.Background())
		}
		must.Do(t, err)
		return r
	}
	expired := func(what string, err error) {
		t.Helper()
		if !errors.Is(err, status.ErrExpired) {
			t.Errorf("%s: %v", what, err)
		}
	}
	var all sync.WaitGroup
	var held []client.Request
	for i := range window - 1 { // one leads, the others follow
		r := claim(time.Now().Add(time.Duration(100+50*i) * time.Millisecond))
		held = append(held, r)
		all.Go(func() { expired("Wait", r.Wait(background(t))) })
	}
	all.Wait()
	expired("Poll", held[0].Poll())
	polled := claim(time.Now().Add(100 * time.Millisecond))
	for err = polled.Poll(); errors.Is(err, status.ErrNotDone); err = polled.Poll() {
		time.Sleep(time.Millisecond)
	}
	expired("Poll until it ends", err)
	held = append(held, polled)
	for _, r := range held {
		must.Check(t, r.Release())
	}
	for what, call := range map[string]func() error{
		"Claim": func() error { _, err := c.Claim(soon(), 1); return err }, // the broker still has all slots
		"Infer": func() error { return ask(soon(), other, cmdAnswer, 0, 1) },
		"Dial":  func() error { _, err := client.Dial(soon(), "m", client.WithSocket(h.socket)); return err },
		"Stats": func() error { _, err := admin.New(h.socket).Stats(soon()); return err },
		"Attach": func() error {
			_, err := worker.Attach(soon(), theModel.WorkerConfig(h.socket))
			return err
		},
		"Next": func() error { _, err := w.Next(soon()); return err },
	} {
		all.Go(func() {
			if err := call(); !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, status.ErrExpired) {
				t.Errorf("%s: %v", what, err)
			}
		})
	}
	all.Wait()
	w.Close()
	c.Close()
	other.Close()
}
