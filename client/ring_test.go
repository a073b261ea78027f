// SPDX-License-Identifier: Apache-2.0

package client_test

import (
	"context"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/client/ringbatchtest"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/test/testbed"
	"github.com/ringbatch/ringbatch/worker"
)

// patience is how long anything may take here before it counts as stuck.
const patience = 2 * time.Minute

// ring is a broker with one model, "m", in this process.
type ring struct {
	t      *testing.T
	model  broker.ModelConfig
	socket string
	broker *ringbatchtest.Broker
}

func newRing(t *testing.T, model broker.ModelConfig) *ring {
	t.Helper()
	model.Name = "m"
	r := &ring{t: t, model: model}
	r.broker = testbed.StartOnHeap(t, broker.Config{Models: []broker.ModelConfig{model}, DrainTime: 10 * time.Millisecond})
	r.socket = r.broker.Socket()
	return r
}

// start serves again after stop, the model as it is now.
func (r *ring) start() {
	r.t.Helper()
	r.broker.Config.Models = []broker.ModelConfig{r.model}
	must.Do(r.t, r.broker.Start())
}

func (r *ring) stop() {
	if err := r.broker.Stop(); err != nil {
		r.t.Errorf("broker: %v", err)
	}
}

// work serves the model until the returned function is called.
func (r *ring) work(fn worker.Func) (leave func()) { return r.workAs(worker.Config{}, fn) }

// workAs is work with another configuration.
func (r *ring) workAs(cfg worker.Config, fn worker.Func) (leave func()) {
	cfg.Model, cfg.Signature = "m", r.model.Signature
	return r.broker.Serve(r.t, cfg, fn)
}

func (r *ring) dial(opts ...client.Option) *client.Client {
	r.t.Helper()
	c, err := client.Dial(soon(r.t), "m", append([]client.Option{client.WithSocket(r.socket)}, opts...)...)
	must.Do(r.t, err)
	r.t.Cleanup(func() { c.Close() })
	return c
}

// soon is a context without a deadline that ends a stuck test.
func soon(t *testing.T) context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	timer := time.AfterFunc(patience, cancel)
	t.Cleanup(func() { timer.Stop(); cancel() })
	return ctx
}

func signature(t *testing.T, inputs, outputs []string) (sig tensor.Signature) {
	t.Helper()
	parse := func(texts []string) (specs []tensor.Spec) {
		for _, text := range texts {
			spec, err := tensor.ParseSpec(text)
			must.Do(t, err)
			specs = append(specs, spec)
		}
		return specs
	}
	return tensor.Signature{Inputs: parse(inputs), Outputs: parse(outputs)}
}

// plain is y = 2x over four numbers.
func plain(t *testing.T) broker.ModelConfig {
	return broker.ModelConfig{Signature: signature(t, []string{"x:f32[4]"}, []string{"y:f32[4]"}), Policy: asks()}
}

func double(_ context.Context, b *worker.Batch) error {
	for i := range b.Rows() {
		x, y := worker.Row[float32](b.Input(0), i), worker.Row[float32](b.Output(0), i)
		for j := range x {
			y[j] = 2 * x[j]
		}
	}
	return nil
}
