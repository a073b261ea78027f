// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"fmt"

	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/worker"
)

// A model with Stages is a pipeline of two or three stages with the same answers as the
// model. Each stage reads x and, except the first, the output of the stage before.

// Step is the output of stage k (from 1) of n for the number x at place j of a row.
// before is the output of the stage before.
func Step(k, n int, before, x int64, j int) (y int64) {
	y = before
	if k == 1 {
		y = x * 0x9e3779b9
	}
	if k == 2 {
		y += x >> 7
	}
	if k == n {
		y += int64(j) * 0x85ebca6b
	}
	return y
}

// StageName is the name of stage k (from 1).
func (m Model) StageName(k int) string { return fmt.Sprintf("s%d", k) }

// StageSignature has the tensors of stage k.
func (m Model) StageSignature(k int) tensor.Signature {
	sig := m.Signature()
	between := func(k int) tensor.Spec {
		t := sig.Inputs[0]
		t.Name = fmt.Sprintf("h%d", k)
		return t
	}
	in, out := sig.Inputs, sig.Outputs
	if k > 1 {
		in = []tensor.Spec{in[0], between(k - 1)}
	}
	if k < m.Stages {
		out = []tensor.Spec{between(k)}
	}
	return tensor.Signature{Inputs: in, Outputs: out}
}

func (m Model) stages() (list []broker.StageConfig) {
	for k := 1; k <= m.Stages; k++ {
		list = append(list, broker.StageConfig{Name: m.StageName(k), Signature: m.StageSignature(k)})
	}
	return list
}

// StageConfig configures a worker of stage k.
func (m Model) StageConfig(k int, socket string) worker.Config {
	return worker.Config{Socket: socket, Model: m.Name + "/" + m.StageName(k), Signature: m.StageSignature(k)}
}

// RunStage computes stage k of a row.
func (m Model) RunStage(k int, b *worker.Batch, row int) {
	x, y := worker.Row[int64](b.Input(0), row), worker.Row[int64](b.Output(0), row)
	before := x
	if k > 1 {
		before = worker.Row[int64](b.Input(1), row)
	}
	for j := range x {
		y[j] = Step(k, m.Stages, before[j], x[j], j)
	}
}
