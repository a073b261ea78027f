// SPDX-License-Identifier: Apache-2.0

package cpu

import (
	"context"
	"fmt"
	"math"

	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/worker"
)

// newAffine computes y = scale·x + offset in the input's own type.
func newAffine(o Options) (*Model, error) {
	sig := Elementwise(o.Inputs)
	if err := CheckAffine(sig.Inputs, o.Scale, o.Offset); err != nil {
		return nil, err
	}
	variable := tensor.VariableDims(sig.Inputs)
	run := func(_ context.Context, b *worker.Batch) error {
		for k, t := range sig.Inputs {
			switch t.DType {
			case tensor.F32:
				affine[float32](b, k, o)
			case tensor.F64:
				affine[float64](b, k, o)
			case tensor.I32:
				affine[int32](b, k, o)
			case tensor.I64:
				affine[int64](b, k, o)
			}
		}
		return MirrorDims(b, variable)
	}
	return &Model{Signature: sig, Run: run, Alone: func(rows int) func() { return affineAlone(sig.Inputs, rows, o) }}, nil
}

// CheckAffine refuses what affine would not compute as asked: other element
// types, and a scale or offset that the input's own type cannot hold.
func CheckAffine(inputs []tensor.Spec, scale, offset float64) error {
	for _, t := range inputs {
		most := 0.0 // float64(math.MaxInt64) is one more than that: compared with <
		switch t.DType {
		case tensor.F32, tensor.F64:
			continue
		case tensor.I32:
			most = 1 << 31
		case tensor.I64:
			most = 1 << 63
		default:
			return fmt.Errorf("%w: affine computes f32, f64, i32 and i64; %q is %s", status.ErrDType, t.Name, t.DType)
		}
		for _, v := range []float64{scale, offset} {
			if v != math.Trunc(v) || v < -most || v >= most {
				return fmt.Errorf("%w: %q is %s, which cannot hold %v: scale and offset must be whole numbers of that type", status.ErrInvalid, t.Name, t.DType, v)
			}
		}
	}
	return nil
}

// affineAlone computes on private memory.
func affineAlone(inputs []tensor.Spec, rows int, o Options) func() {
	var each []func()
	for _, t := range inputs {
		n := rows * t.RowElems()
		switch t.DType {
		case tensor.F32:
			each = append(each, affineOf[float32](n, o))
		case tensor.F64:
			each = append(each, affineOf[float64](n, o))
		case tensor.I32:
			each = append(each, affineOf[int32](n, o))
		case tensor.I64:
			each = append(each, affineOf[int64](n, o))
		}
	}
	return func() {
		for _, f := range each {
			f()
		}
	}
}

func affineOf[T number](n int, o Options) func() {
	x, y := make([]T, n), make([]T, n)
	return func() { affineRow(y, x, T(o.Scale), T(o.Offset)) }
}

type number interface {
	float32 | float64 | int32 | int64
}

func affine[T interface {
	number
	tensor.Element
}](b *worker.Batch, k int, o Options) {
	in, out := b.Input(k), b.Output(k)
	scale, offset := T(o.Scale), T(o.Offset)
	for i := range b.Rows() {
		affineRow(worker.Row[T](out, i), worker.Row[T](in, i), scale, offset)
	}
}

func affineRow[T number](y, x []T, scale, offset T) {
	for j, v := range x {
		y[j] = scale*v + offset
	}
}
