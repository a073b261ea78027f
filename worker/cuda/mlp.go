// SPDX-License-Identifier: Apache-2.0

//go:build cuda

package cuda

import (
	"fmt"

	"gorgonia.org/cu"

	"github.com/ringbatch/ringbatch/internal/mlp"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

// The perceptron of internal/mlp on the GPU, with the same weights.
//
// With f32 the bits of the results are those of the CPU's vector kernels.
// With f16 or bf16, weights and activations are rounded once per layer and
// summed in f32; against f32, ‖y − ref‖ / ‖ref‖ stays below TolF16, TolBF16.
const (
	TolF16  = 2e-3
	TolBF16 = 1.6e-2
)

// Shapes of the kernels in kernels/dense.cu.
const (
	f32Rows   = 4  // rows per thread of rb_dense_f32
	tile      = 16 // of rb_dense_half, in inputs and outputs
	halfBlock = 256
	halfBytes = 2
)

type perceptron struct {
	plain
	half   bool
	layers []denseLayer
	dense  cu.Function
	pack   cu.Function
}

type denseLayer struct {
	in, out       int // true sizes
	inPad, outPad int // whole tiles; the true sizes for f32
	weights, bias cu.DevicePtr
}

func newMLP(o Options) (*Model, error) {
	switch o.Precision {
	case "", "f32", "f16", "bf16":
	default:
		return nil, fmt.Errorf("%w: precision %q; there are f32, f16 and bf16", status.ErrInvalid, o.Precision)
	}
	source, err := openMLP(o)
	if err != nil {
		return nil, err
	}
	sig := tensor.Signature{
		Inputs:  []tensor.Spec{{Name: "x", DType: tensor.F32, Shape: []int{source.In()}}},
		Outputs: []tensor.Spec{{Name: "y", DType: tensor.F32, Shape: []int{source.Out()}}},
	}
	load := func(d *device) (program, error) {
		p := &perceptron{half: o.Precision == "f16" || o.Precision == "bf16"}
		return p, p.load(d, source, o.Precision)
	}
	return &Model{Signature: sig, load: load}, nil
}

func openMLP(o Options) (*mlp.MLP, error) {
	cfg := mlp.Default()
	if len(o.Sizes) > 0 {
		cfg.Sizes = o.Sizes
	}
	if o.Seed != 0 {
		cfg.Seed = o.Seed
	}
	return mlp.New(cfg)
}

func (p *perceptron) load(d *device, source *mlp.MLP, precision string) error {
	ptx, name := densePTX, "dense"
	if precision == "bf16" {
		if d.capability < 80 {
			return fmt.Errorf("%w: bf16 needs compute capability 8.0, %s has %d.%d; use f16", status.ErrInvalid, d.name,
				d.capability/10, d.capability%10)
		}
		ptx, name = denseBF16PTX, "dense_bf16"
	}
	m, err := d.module(name, ptx)
	if err != nil {
		return err
	}
	kernel := "rb_dense_f32"
	if p.half {
		kernel = "rb_dense_half"
	}
	if p.dense, err = function(m, kernel); err != nil {
		return err
	}
	if p.pack, err = function(m, "rb_pack_half"); err != nil {
		return err
	}
	sizes := source.Sizes()
	for i := range source.Layers() {
		l := denseLayer{in: sizes[i], out: sizes[i+1], inPad: sizes[i], outPad: sizes[i+1]}
		w, bias := source.Weights(i)
		if p.half {
			l.inPad, l.outPad = roundUp(l.in, tile), roundUp(l.out, tile)
			bias = append(bias, make([]float32, l.outPad-l.out)...)
			err = p.uploadHalf(&l, w)
		} else {
			l.weights, err = upload(transposed(w, l.out, l.in))
		}
		if err != nil {
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

// uploadHalf rounds the weights on the device, into whole tiles.
func (p *perceptron) uploadHalf(l *denseLayer, w []float32) error {
	full, err := upload(w)
	if err != nil {
		return err
	}
	if l.weights, err = alloc(int64(l.inPad * l.outPad * halfBytes)); err != nil {
		return err
	}
	if err := launch(cu.NoStream, p.pack, spread(l.inPad*l.outPad), word(l.weights), word(l.outPad), word(l.inPad), word(full),
		word(l.in), word(l.out), word(l.in)); err != nil {
		return err
	}
	if err := checked("cuCtxSynchronize", cu.Synchronize()); err != nil {
		return err
	}
	return checked("cuMemFree", cu.MemFree(full))
}

// activations are a lane's two buffers between layers.
type activations struct {
	x, y cu.DevicePtr
	last cu.DevicePtr // f32, padded; half only
}

func (p *perceptron) prepare(l *lane, layout *shm.Layout) (err error) {
	widest := 0
	for _, d := range p.layers {
		widest = max(widest, d.inPad, d.outPad)
	}
	a := &activations{}
	for _, to := range []*cu.DevicePtr{&a.x, &a.y, &a.last} {
		if *to, err = l.buffer(int64(4 * roundUp(layout.MaxBatch, rowTile) * widest)); err != nil {
			return err
		}
	}
	l.scratch = a
	return nil
}

func (p *perceptron) enqueue(l *lane) error {
	if p.half {
		return p.enqueueHalf(l)
	}
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

// enqueueHalf rounds the inputs into whole tiles, runs the layers on the
// tensor cores, and leaves the last one's f32 results in l.out.
func (p *perceptron) enqueueHalf(l *lane) error {
	a := l.scratch.(*activations)
	first, final := p.layers[0], p.layers[len(p.layers)-1]
	rows := l.batch.PadTo()
	padded := roundUp(rows, rowTile)
	if err := launch(l.stream, p.pack, spread(padded*first.inPad), word(a.x), word(padded), word(first.inPad), word(l.in[0]),
		word(first.in), word(rows), word(first.in)); err != nil {
		return err
	}
	x, y := a.x, a.y
	for i, d := range p.layers {
		relu, last, to := 1, 0, y
		if i == len(p.layers)-1 {
			relu, last, to = 0, 1, l.out[0]
			if final.outPad != final.out {
				to = a.last
			}
		}
		grid := dims{gridX: d.outPad / tile, gridY: padded / rowTile, block: halfBlock}
		if err := launch(l.stream, p.dense, grid, word(to), word(d.outPad), word(x), word(d.weights), word(d.bias),
			word(d.inPad), word(relu), word(last)); err != nil {
			return err
		}
		x, y = y, x
	}
	if final.outPad == final.out {
		return nil
	}
	// Copy the rows without their padding.
	size, stride := int64(4*final.out), int64(4*final.outPad)
	for r := range int64(l.batch.Rows()) {
		err := cu.MemcpyDtoDAsync(l.out[0]+cu.DevicePtr(r*size), a.last+cu.DevicePtr(r*stride), size, l.stream)
		if err := checked("cuMemcpyDtoDAsync", err); err != nil {
			return err
		}
	}
	return nil
}
