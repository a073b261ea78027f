// SPDX-License-Identifier: Apache-2.0

//go:build cuda

package cuda

import (
	"math"

	"gorgonia.org/cu"

	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/worker/cpu"
)

// newEcho gives every input back: up to the GPU and down again.
func newEcho(o Options) (*Model, error) {
	sig := cpu.Elementwise(o.Inputs)
	p := echo{plain{tensor.VariableDims(sig.Inputs)}}
	return &Model{Signature: sig, load: func(*device) (program, error) { return p, nil }}, nil
}

type echo struct{ plain }

func (echo) inPlace() bool       { return true }
func (echo) readsSlots() bool    { return true }
func (echo) enqueue(*lane) error { return nil }

// newAffine computes y = scale·x + offset in the input's own type.
func newAffine(o Options) (*Model, error) {
	sig := cpu.Elementwise(o.Inputs)
	p := &affine{plain: plain{tensor.VariableDims(sig.Inputs)}}
	if err := cpu.CheckAffine(sig.Inputs, o.Scale, o.Offset); err != nil {
		return nil, err
	}
	for _, t := range sig.Inputs {
		p.types = append(p.types, t.DType)
	}
	return &Model{Signature: sig, load: func(d *device) (program, error) { return p, p.load(d, o) }}, nil
}

type affine struct {
	plain
	types         []tensor.DType
	kernels       []cu.Function
	scale, offset []uint64 // the bits of the number in each input's type
}

func (*affine) inPlace() bool { return true }

func (p *affine) load(d *device, o Options) error {
	m, err := d.module("affine", affinePTX)
	if err != nil {
		return err
	}
	for _, t := range p.types {
		f, err := function(m, "rb_affine_"+t.String())
		if err != nil {
			return err
		}
		p.kernels = append(p.kernels, f)
		p.scale = append(p.scale, numberBits(t, o.Scale))
		p.offset = append(p.offset, numberBits(t, o.Offset))
	}
	return nil
}

// numberBits is v in type t, as a kernel's argument.
func numberBits(t tensor.DType, v float64) uint64 {
	switch t {
	case tensor.F32:
		return uint64(math.Float32bits(float32(v)))
	case tensor.F64:
		return math.Float64bits(v)
	case tensor.I32:
		return uint64(uint32(int32(v)))
	default:
		return uint64(int64(v))
	}
}

func (p *affine) enqueue(l *lane) error {
	for k, f := range p.kernels {
		n := l.batch.PadTo() * int(rowBytes(l.batch, l.r.layout, k)) / p.types[k].Size()
		if err := launch(l.stream, f, spread(n), word(l.out[k]), word(l.in[k]), word(n), p.scale[k], p.offset[k]); err != nil {
			return err
		}
	}
	return nil
}
