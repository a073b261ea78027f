package cpu

import (
	"context"
	"fmt"

	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/worker"
)

// newAffine computes y = scale·x + offset in the input's own type.
func newAffine(o Options) (*Model, error) {
	sig := Elementwise(o.Inputs)
	for _, t := range sig.Inputs {
		switch t.DType {
		case shm.F32, shm.F64, shm.I32, shm.I64:
		default:
			return nil, fmt.Errorf("%w: affine computes f32, f64, i32 and i64; %q is %s", shm.ErrDType, t.Name, t.DType)
		}
	}
	variable := shm.VariableDims(sig.Inputs)
	run := func(_ context.Context, b *worker.Batch) error {
		for k, t := range sig.Inputs {
			switch t.DType {
			case shm.F32:
				affine[float32](b, k, o)
			case shm.F64:
				affine[float64](b, k, o)
			case shm.I32:
				affine[int32](b, k, o)
			case shm.I64:
				affine[int64](b, k, o)
			}
		}
		return MirrorDims(b, variable)
	}
	return &Model{Signature: sig, Run: run, Alone: func(rows int) func() { return affineAlone(sig.Inputs, rows, o) }}, nil
}

// affineAlone computes on private memory.
func affineAlone(inputs []shm.TensorSpec, rows int, o Options) func() {
	var each []func()
	for _, t := range inputs {
		n := rows * t.RowElems()
		switch t.DType {
		case shm.F32:
			each = append(each, affineOf[float32](n, o))
		case shm.F64:
			each = append(each, affineOf[float64](n, o))
		case shm.I32:
			each = append(each, affineOf[int32](n, o))
		case shm.I64:
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
	shm.Element
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
