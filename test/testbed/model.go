// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/worker"
)

// Model is the model of the rigs. A row is numbers, and the first may be a command to
// the worker. Each number of the answer depends on the input's number and its place.
type Model struct {
	Name        string
	Slots       int
	MaxBatch    int
	Wait, Lease time.Duration
	Width       int // numbers of a row; default Width
	Private     bool
	Stages      int  // of a pipeline; see pipeline.go
	Lanes       int  // rows that a worker holds at once, which go round
	State       bool // the model runs sequences; see sequence.go
	Streams     bool // the output grows
}

// Width is the default length of a row.
const Width = 16

// Answer is the model's output for the number x at place j of a row.
func Answer(x int64, j int) int64 { return x*0x9e3779b9 + int64(j)*0x85ebca6b + x>>7 }

// Signature has one input, x, and one output, y.
func (m Model) Signature() tensor.Signature {
	n := m.Width
	if n == 0 {
		n = Width
	}
	sig := tensor.Signature{
		Inputs:  []tensor.Spec{{Name: "x", DType: tensor.I64, Shape: []int{n}}},
		Outputs: []tensor.Spec{{Name: "y", DType: tensor.I64, Shape: []int{n}}},
	}
	if m.Streams {
		sig.Outputs[0].Variable = []int{0}
	}
	if m.State {
		sig.State = []tensor.Spec{{Name: "h", DType: tensor.I64, Shape: []int{n}}}
	}
	return sig
}

// Config declares the model to a broker.
func (m Model) Config() broker.ModelConfig {
	return broker.ModelConfig{Name: m.Name, Signature: m.Signature(), Policy: m.policy(), Stages: m.stages()}
}

// WorkerConfig configures a worker that declares the model.
func (m Model) WorkerConfig(socket string) worker.Config {
	return worker.Config{
		Socket: socket, Model: m.Name, Signature: m.Signature(), Policy: m.policy(), Concurrency: m.Lanes,
	}
}

// ErrWrongBytes reports a wrong answer.
var ErrWrongBytes = errors.New("wrong bytes")

// Ask sends rows of that width and checks every number of the answer.
func Ask(ctx context.Context, c *client.Client, x []int64, width int) error {
	outs, err := c.Infer(ctx, x)
	if err != nil {
		return err
	}
	y, err := tensor.As[int64](outs[0])
	if err != nil {
		return err
	}
	for i := range x {
		if want := Answer(x[i], i%width); y[i] != want {
			return fmt.Errorf("%w: row %d, element %d is %d, not %d", ErrWrongBytes, i/width, i%width, y[i], want)
		}
	}
	return nil
}

// policy has the settings of the model that are not 0.
func (m Model) policy() policy.Policy {
	p := policy.Policy{}
	for _, s := range []struct {
		asked   bool
		setting policy.Setting
	}{
		{m.MaxBatch != 0, policy.MaxBatchSize(m.MaxBatch)},
		{m.Wait != 0, policy.WaitTime(m.Wait)},
		{m.Slots != 0, policy.Slots(m.Slots)},
		{m.Lease != 0, policy.Lease(m.Lease)},
		{m.Private, policy.Private(true)},
	} {
		if s.asked {
			p = policy.New(s.setting).Over(p)
		}
	}
	return p
}
