// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"sync"
	"testing"

	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/client/ringbatchtest"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/test/testbed"
	"github.com/ringbatch/ringbatch/worker"
)

// ring is a broker with workers and clients in this process.
type ring struct{ observer }

func inProcess(t *testing.T, models ...testbed.Model) *ring {
	t.Helper()
	return onLoops(t, 0, models...)
}

// onLoops is inProcess with a number of loops; 0 is the default.
func onLoops(t *testing.T, loops int, models ...testbed.Model) *ring {
	t.Helper()
	cfg := broker.Config{Loops: loops}
	for _, m := range models {
		cfg.Models = append(cfg.Models, m.Config())
	}
	return &ring{observer{t, testbed.StartOnHeap(t, cfg).Socket()}}
}

// worker serves until the returned function is called, or the test ends.
func (r *ring) worker(depth int, fn worker.Func) (leave func()) {
	return r.serve(worker.Config{Depth: depth}, fn)
}

// serve is worker with a configuration.
func (r *ring) serve(cfg worker.Config, fn worker.Func) (leave func()) {
	cfg.Model, cfg.Signature, cfg.Socket = "m", theModel.Signature(), r.socket
	return r.serveAs(cfg, fn)
}

// serveAs is serve for the model or stage of the configuration.
func (r *ring) serveAs(cfg worker.Config, fn worker.Func) (leave func()) {
	end := ringbatchtest.Serve(cfg, fn)
	leave = sync.OnceFunc(func() {
		if err := end(); err != nil && !errors.Is(err, context.Canceled) {
			r.t.Errorf("worker: %v", err)
		}
	})
	r.t.Cleanup(leave)
	return leave
}

func (r *ring) dial(opts ...client.Option) *client.Client {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	c, err := client.Dial(ctx, "m", append([]client.Option{client.WithSocket(r.socket), client.WaitForModel()},
		opts...)...)
	must.Do(r.t, err)
	return c
}

// settled waits until every slot is back and every request has ended once.
func (r *ring) settled() {
	r.t.Helper()
	r.eventually("everything is given back", func() error {
		m := r.model("m")
		return testbed.Settled(&m)
	})
}
