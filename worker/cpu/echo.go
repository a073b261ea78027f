// SPDX-License-Identifier: Apache-2.0

package cpu

import (
	"context"

	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/worker"
)

// newEcho returns every input.
func newEcho(o Options) (*Model, error) {
	sig := Elementwise(o.Inputs)
	variable := tensor.VariableDims(sig.Inputs)
	run := func(_ context.Context, b *worker.Batch) error {
		for k := range sig.Inputs {
			copyColumn(b, k)
		}
		return MirrorDims(b, variable)
	}
	alone := func(rows int) func() {
		bytes := 0
		for _, t := range sig.Inputs {
			bytes += rows * t.RowBytes()
		}
		in, out := make([]byte, bytes), make([]byte, bytes)
		return func() { copy(out, in) }
	}
	return &Model{Signature: sig, Run: run, Alone: alone}, nil
}

// copyColumn copies the k-th input to the k-th output: each run in one copy, and rows
// with gaps between them one by one.
func copyColumn(b *worker.Batch, k int) {
	in, out := b.Input(k), b.Output(k)
	if in.RowBytes() == in.Spec().RowBytes() {
		for i := range b.Runs() {
			copy(out.RunBytes(i), in.RunBytes(i))
		}
		return
	}
	for i := range b.Rows() {
		copy(out.Bytes(i), in.Bytes(i))
	}
}
