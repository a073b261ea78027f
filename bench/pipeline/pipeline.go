// SPDX-License-Identifier: Apache-2.0

// Package pipeline compares a pipeline with two models that a client calls one after the other. Both stages do nothing, and
// 602,112 bytes pass between them; the client copies these bytes from one slot to the other.
package pipeline

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"time"

	"github.com/ringbatch/ringbatch/bench/rig"
	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/test/testbed"
	"github.com/ringbatch/ringbatch/worker"
)

// Aims: docs/pipelines.md.
const (
	aimThroughput = 1.3 // × the two models'
	aimLatency    = 0.7

	between = 602112 // bytes
	atOnce  = 8
)

// part is a model, or a stage: both are the same to a worker.
type part struct {
	Socket, Model string
	Second        bool
}

func (p *part) signature() tensor.Signature {
	spec := func(name string, bytes int) []tensor.Spec {
		return []tensor.Spec{{Name: name, DType: tensor.U8, Shape: []int{bytes}}}
	}
	if p.Second {
		return tensor.Signature{Inputs: spec("h", between), Outputs: spec("y", 64)}
	}
	return tensor.Signature{Inputs: spec("x", 64), Outputs: spec("h", between)}
}

// Roles of this suite's processes.
func Roles() testbed.Roles {
	return testbed.Roles{"pipeline broker": testbed.With(brokerRole), "pipeline worker": testbed.With(workerRole)}
}

func brokerRole(c *testbed.Child, socket string) error {
	one, two := (&part{}).signature(), (&part{Second: true}).signature()
	p := policy.New(policy.Slots(64), policy.MaxBatchSize(8), policy.WaitTime(0))
	b, err := broker.New(broker.Config{Socket: socket, Logger: slog.New(slog.DiscardHandler), Models: []broker.ModelConfig{
		{Name: "one", Signature: one, Policy: p},
		{Name: "two", Signature: two, Policy: p},
		{Name: "both", Signature: tensor.Signature{Inputs: one.Inputs, Outputs: two.Outputs}, Policy: p, Stages: []broker.StageConfig{
			{Name: "one", Signature: one}, {Name: "two", Signature: two},
		}},
	}})
	if err != nil {
		return err
	}
	if err := c.Ready(); err != nil {
		return err
	}
	return b.Serve(c.Context())
}

func workerRole(c *testbed.Child, p part) error {
	var ready error
	cfg := worker.Config{Socket: p.Socket, Model: p.Model, Signature: p.signature(), Attached: func() { ready = c.Ready() }}
	err := worker.Serve(c.Context(), cfg, func(_ context.Context, b *worker.Batch) error { testbed.Touch(b); return nil })
	return errors.Join(ready, err)
}

// Run is `bench pipeline`.
func Run(ctx context.Context, args []string, out io.Writer) error {
	s := rig.Suite{Name: "pipeline", About: "What a pipeline saves; see docs/pipelines.md.", Rounds: 5, Round: time.Second,
		Parts: []rig.Part{{Name: "two_stages", Run: measure}}}
	return s.Run(ctx, args, out)
}

func measure(r *rig.Rig) {
	socket := r.Path("b.sock")
	r.MustStart(testbed.Spec{Role: "pipeline broker", Job: socket})
	for _, p := range []part{{Model: "one"}, {Model: "two", Second: true}, {Model: "both/one"}, {Model: "both/two", Second: true}} {
		p.Socket = socket
		r.MustStart(testbed.Spec{Role: "pipeline worker", Job: p})
	}
	clients := map[string]*client.Client{}
	for _, model := range []string{"one", "two", "both"} {
		c, err := client.Dial(r.Context(), model, client.WithSocket(socket), client.WithWindow(atOnce))
		r.Must(err)
		defer c.Close()
		clients[model] = c
	}
	pipeline := func(ctx context.Context) error { return ask(ctx, clients["both"], nil, nil) }
	models := func(ctx context.Context) error {
		return ask(ctx, clients["one"], nil, func(h []byte) error { return ask(ctx, clients["two"], h, nil) })
	}
	for _, n := range []int{atOnce, 1} {
		var sets [2][]rig.Caller
		for range n {
			sets[0], sets[1] = append(sets[0], models), append(sets[1], pipeline)
		}
		t := r.Compare(fmt.Sprintf("%d at once", n), sets[0], sets[1])
		text := fmt.Sprintf("%d at once, %d bytes between the stages: pipeline %.0f requests/s, p50 %.0f µs; one model after the other "+
			"%.0f, %.0f µs",
			n, between, t[1].PerSecond, t[1].MedianUS, t[0].PerSecond, t[0].MedianUS)
		r.Check(fmt.Sprintf("throughput_%d", n), t[1].PerSecond/t[0].PerSecond, ">=", aimThroughput, "%s", text)
		r.Check(fmt.Sprintf("latency_%d", n), t[1].MedianUS/t[0].MedianUS, "<=", aimLatency, "%s", text)
	}
}

// ask is one request, in place: input is copied into its slot, and use reads the output there.
func ask(ctx context.Context, c *client.Client, input []byte, use func(output []byte) error) error {
	req, err := c.Claim(ctx, 1)
	if err != nil {
		return err
	}
	defer req.Release()
	in, err := req.InputBytes(0)
	if err != nil {
		return err
	}
	copy(in, input)
	if err := req.Commit(ctx); err != nil {
		return err
	}
	if err := req.Wait(ctx); err != nil {
		return err
	}
	out, err := req.OutputBytes(0)
	if err == nil && use != nil {
		err = use(out)
	}
	return err
}
