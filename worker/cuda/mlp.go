// SPDX-License-Identifier: Apache-2.0

//go:build cuda

package cuda

import (
	"fmt"

	"gorgonia.org/cu"

	"github.com/ringbatch/ringbatch/internal/mlp"
	"github.com/ringbatch/ringbatch/tensor"
)

// The perceptron of internal/mlp on the GPU, with the same weights: the results have the
// bits of the CPU's vector kernels.

const f32Rows = 4 // rows per thread of kernels/dense.cu

type perceptron struct {
	plain
	layers []denseLayer
	dense  cu.Function
}

type denseLayer struct {
	in, out       int
	weights, bias cu.DevicePtr
}

func newMLP(o Options) (*Model, error) {
	source, err := openMLP(o)
	if err != nil {
		return nil, err
	}
	sig := tensor.Signature{
		Inputs:  []tensor.Spec{{Name: "x", DType: tensor.F32, Shape: []int{source.In()}}},
		Outputs: []tensor.Spec{{Name: "y", DType: tensor.F32, Shape: []int{source.Out()}}},
	}
	load := func(d *device) (program, error) {
		p := &perceptron{}
		return p, p.load(d, source)
	}
	return &Model{Signature: sig, load: load}, nil
}

func openMLP(o Options) (*mlp.MLP, error) {
	if o.Weights != "" {
		return mlp.Load(o.Weights)
	}
	cfg := mlp.Default()
	if len(o.Sizes) > 0 {
		cfg.Sizes = o.Sizes
	}
	if o.Seed != 0 {
		cfg.Seed = o.Seed
	}
	return mlp.New(cfg)
}

func (p *perceptron) load(d *device, source *mlp.MLP) error {
	m, err := d.module("dense", densePTX)
	if err != nil {
		return err
	}
	if p.dense, err = function(m, "rb_dense_f32"); err != nil {
		return err
	}
	sizes := source.Sizes()
	for i := range source.Layers() {
		l := denseLayer{in: sizes[i], out: sizes[i+1]}
		w, bias := source.Weights(i)
		if l.weights, err = upload(transposed(w, l.out, l.in)); err != nil {
			return fmt.Errorf("weights of layer %d: %w", i, err)
		}
		if l.bias, err = upload(bias); err != nil {
			return fmt.Errorf("bias of layer %d: %w", i, err)
		}
		p.layers = append(p.layers, l)
	}
	return checked("cuCtxSynchronize", cu.Synchronize())
}

func transposed(w []float32, rows, cols int) []float32 {
	t := make([]float32, len(w))
	for r := range rows {
		for c := range cols {
			t[c*rows+r] = w[r*cols+c]
		}
	}
	return t
}

// activations are a lane's two buffers between layers.
type activations struct{ x, y cu.DevicePtr }

func (p *perceptron) prepare(l *lane, rows int) (err error) {
	widest := 0
	for _, d := range p.layers {
		widest = max(widest, d.in, d.out)
	}
	a := &activations{}
	for _, to := range []*cu.DevicePtr{&a.x, &a.y} {
		if *to, err = l.buffer(int64(4 * rows * widest)); err != nil {
			return err
		}
	}
	l.scratch = a
	return nil
}

func (p *perceptron) enqueue(l *lane) error {
	a := l.scratch.(*activations)
	rows, x, y := l.batch.PadTo(), l.in[0], a.x
	for i, d := range p.layers {
		relu := 1
		if i == len(p.layers)-1 {
			y, relu = l.out[0], 0
		}
		grid := dims{gridX: (d.out + 127) / 128, gridY: (rows + f32Rows - 1) / f32Rows, block: 128}
		if err := launch(l.stream, p.dense, grid, word(y), word(d.out), word(x), word(d.in), word(d.weights), word(d.bias),
			word(rows), word(d.in), word(d.out), word(relu)); err != nil {
			return err
		}
		if x, y = y, a.y; x == a.y {
			y = a.x
		}
	}
	return nil
}
