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

// newAffine computes y = scale·x + offset in the input's type.
func newAffine(o Options) (*Model, error) {
	sig := Elementwise(o.Inputs)
	if err := CheckAffine(sig.Inputs, o.Scale, o.Offset); err != nil {
		return nil, err
	}
	variable := tensor.VariableDims(sig.Inputs)
	run := func(_ context.Context, b *worker.Batch) error {
		for k, t := range sig.Inputs {
			affineTypes[t.DType].run(b, k, o)
		}
		return MirrorDims(b, variable)
	}
	alone := func(rows int) func() {
		var each []func()
		for _, t := range sig.Inputs {
			each = append(each, affineTypes[t.DType].alone(rows*t.RowElems(), o))
		}
		return func() {
			for _, compute := range each {
				compute()
			}
		}
	}
	return &Model{Signature: sig, Run: run, Alone: alone}, nil
}

// affineTypes has the computation for each element type that affine knows.
var affineTypes = map[tensor.DType]struct {
	run   func(b *worker.Batch, k int, o Options)
	alone func(elements int, o Options) func()
}{
	tensor.F32: {affine[float32], affineAlone[float32]}, tensor.F64: {affine[float64], affineAlone[float64]},
	tensor.I32: {affine[int32], affineAlone[int32]}, tensor.I64: {affine[int64], affineAlone[int64]},
}

// CheckAffine refuses element types that affine does not know, and a scale or offset
// that the input's type cannot hold.
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
				return fmt.Errorf("%w: %q is %s, which cannot hold %v: scale and offset must be whole numbers of that type",
					status.ErrInvalid, t.Name, t.DType, v)
			}
		}
	}
	return nil
}

// affineAlone computes on private memory.
func affineAlone[T number](elements int, o Options) func() {
	x, y := make([]T, elements), make([]T, elements)
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
