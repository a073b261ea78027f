package cpu

import (
	"context"
	"fmt"

	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/worker"
)

// newAffine computes y = scale·x + offset in the input's own type.
func newAffine(o Options) (*Model, error) {
	sig := elementwise(o.Inputs)
	for _, t := range sig.Inputs {
		switch t.DType {
		case shm.F32, shm.F64, shm.I32, shm.I64:
		default:
			return nil, fmt.Errorf("%w: affine computes f32, f64, i32 and i64; %q is %s", shm.ErrDType, t.Name, t.DType)
		}
	}
	variable := shm.VariableDims(sig.Inputs)
	return &Model{Signature: sig, Run: func(_ context.Context, b *worker.Batch) error {
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
		return mirrorDims(b, variable)
	}}, nil
}

type number interface{ float32 | float64 | int32 | int64 }

func affine[T interface {
	number
	shm.Element
}](b *worker.Batch, k int, o Options) {
	in, out := b.Input(k), b.Output(k)
	scale, offset := T(o.Scale), T(o.Offset)
	for i := range b.Rows() {
		x, y := worker.Row[T](in, i), worker.Row[T](out, i)
		for j, v := range x {
			y[j] = scale*v + offset
		}
	}
}
