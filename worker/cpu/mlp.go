// SPDX-License-Identifier: Apache-2.0

package cpu

import (
	"context"
	"fmt"
	"math/rand/v2"

	"github.com/ringbatch/ringbatch/internal/mlp"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/worker"
)

// newMLP is a multi-layer perceptron, by default with weights far larger than the caches,
// so that batching pays. It computes on one thread.
func newMLP(o Options) (*Model, error) {
	if len(o.Inputs) > 0 {
		return nil, fmt.Errorf("%w: an mlp has a shape of its own and takes no --input", status.ErrInvalid)
	}
	net, note, err := openMLP(o)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", status.ErrInvalid, err)
	}
	sig := tensor.Signature{
		Inputs:  []tensor.Spec{{Name: "x", DType: tensor.F32, Shape: []int{net.In()}}},
		Outputs: []tensor.Spec{{Name: "y", DType: tensor.F32, Shape: []int{net.Out()}}},
	}
	var xs, ys [][]float32
	run := func(_ context.Context, b *worker.Batch) error {
		in, out := b.Input(0), b.Output(0)
		xs, ys = xs[:0], ys[:0]
		for i := range b.Rows() {
			xs, ys = append(xs, worker.Row[float32](in, i)), append(ys, worker.Row[float32](out, i))
		}
		net.ForwardRows(ys, xs) // reads and writes the slots in place
		return nil
	}
	alone := func(rows int) func() {
		x, y := randomRows(rows*net.In(), o.Seed), make([]float32, rows*net.Out())
		return func() { net.Forward(y, x, rows) }
	}
	return &Model{Signature: sig, Run: run, Alone: alone, Note: note}, nil
}

func openMLP(o Options) (net *mlp.MLP, note string, err error) {
	if o.Weights == "" {
		cfg := mlp.Default()
		cfg.Seed = o.Seed
		net, err = mlp.New(cfg)
		return net, "", err
	}
	if net, err = mlp.Load(o.Weights); err == nil {
		note = fmt.Sprintf("layers of %v, with a ReLU between two of them", net.Sizes())
	}
	return net, note, err
}

func randomRows(n int, seed int64) []float32 {
	rnd := rand.New(rand.NewPCG(uint64(seed), 2))
	x := make([]float32, n)
	for i := range x {
		x[i] = float32(rnd.NormFloat64())
	}
	return x
}
