// SPDX-License-Identifier: Apache-2.0

package cpu

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"

	"github.com/ringbatch/ringbatch/internal/mlp"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/worker"
	"github.com/ringbatch/ringbatch/worker/weights"
)

// newMLP is a multi-layer perceptron with weights far larger than the caches, so that
// batching pays. It computes on one thread.
func newMLP(o Options) (*Model, error) {
	if len(o.Inputs) > 0 {
		return nil, fmt.Errorf("%w: an mlp has a shape of its own and takes no --input", status.ErrInvalid)
	}
	cfg := mlp.Default()
	cfg.Seed = o.Seed
	net, err := mlp.New(cfg)
	if err != nil {
		return nil, err
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
	load := func(v weights.View) error { return loadMLP(net, v) }
	return &Model{Signature: sig, Run: run, Alone: alone, Load: load}, nil
}

// loadMLP loads layers.N.weight and layers.N.bias, as torch's nn.Linear has them.
func loadMLP(net *mlp.MLP, v weights.View) error {
	sizes := net.Sizes()
	if len(v.Tensors) != 2*net.Layers() {
		return fmt.Errorf("%d tensors, an mlp of %d layers has %d", len(v.Tensors), net.Layers(), 2*net.Layers())
	}
	for i := range net.Layers() {
		var parts [2][]float32
		for j, want := range []tensor.Spec{
			{Name: fmt.Sprintf("layers.%d.weight", i), DType: tensor.F32, Shape: []int{sizes[i+1], sizes[i]}},
			{Name: fmt.Sprintf("layers.%d.bias", i), DType: tensor.F32, Shape: []int{sizes[i+1]}},
		} {
			k := slices.IndexFunc(v.Tensors, func(t tensor.Spec) bool { return t.String() == want.String() })
			if k < 0 {
				return fmt.Errorf("no tensor %s", want)
			}
			flat := tensor.Tensor{Name: want.Name, DType: want.DType, Shape: []int{1, want.RowElems()}, Data: v.Tensor(k)}
			var err error
			if parts[j], err = tensor.As[float32](flat); err != nil {
				return err
			}
		}
		net.SetWeights(i, parts[0], parts[1])
	}
	return nil
}

func randomRows(n int, seed int64) []float32 {
	rnd := rand.New(rand.NewPCG(uint64(seed), 2))
	x := make([]float32, n)
	for i := range x {
		x[i] = float32(rnd.NormFloat64())
	}
	return x
}
