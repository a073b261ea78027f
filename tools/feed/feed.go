// SPDX-License-Identifier: Apache-2.0

// Package feed makes inputs of requests that only load a model: rows of the user, or random
// rows by the signature.
package feed

import (
	"fmt"
	"math/rand/v2"

	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

// Feed makes inputs.
type Feed struct {
	inputs []tensor.Tensor // at least one row each
	dims   []int           // sizes of all variable dimensions
}

// New makes a feed for a signature. Inputs that are not given are random, with variable
// dimensions of the largest size: normal numbers for f32, positive numbers below 2 for
// other floats, otherwise whole numbers below 64, which may be tokens or pixels.
func New(sig *tensor.Signature, given []tensor.Tensor, seed uint64) (*Feed, error) {
	byName := map[string]tensor.Tensor{}
	for _, t := range given {
		byName[t.Name] = t
	}
	f := &Feed{}
	var sizes []uint32
	for i := range sig.Inputs {
		spec := &sig.Inputs[i]
		t, ok := byName[spec.Name]
		delete(byName, spec.Name)
		if !ok {
			t = Random(spec, 1, seed+uint64(i)<<32)
		}
		var rows int
		var err error
		if rows, sizes, err = tensor.CheckInput(spec, &t, sizes); err != nil {
			return nil, err
		}
		if rows < 1 {
			return nil, fmt.Errorf("%w: input %q has no rows", status.ErrRows, spec.Name)
		}
		f.inputs = append(f.inputs, t)
	}
	for name := range byName {
		return nil, fmt.Errorf("%w: no input %q; the model has %s", status.ErrInvalid, name, sig)
	}
	for _, n := range sizes {
		f.dims = append(f.dims, int(n))
	}
	return f, nil
}

// Dims are the sizes of all variable dimensions, as Claim takes them.
func (f *Feed) Dims() []int { return f.dims }

// Len is the number of different rows.
func (f *Feed) Len() int {
	most := 1
	for _, t := range f.inputs {
		most = max(most, t.Rows())
	}
	return most
}

// Rows are the inputs of a request of n rows: the feed's rows in a circle, from a row on.
func (f *Feed) Rows(from, n int) []tensor.Tensor {
	out := make([]tensor.Tensor, len(f.inputs))
	for i, t := range f.inputs {
		size := t.RowBytes()
		data := make([]byte, 0, n*size)
		for row := range n {
			data = append(data, t.Row((from + row) % t.Rows()).Data[:size]...)
		}
		out[i] = tensor.Tensor{Name: t.Name, DType: t.DType, Shape: append([]int{n}, t.Shape[1:]...), Data: data}
	}
	return out
}

// Random makes random rows of one input.
func Random(spec *tensor.Spec, rows int, seed uint64) tensor.Tensor {
	rnd := rand.New(rand.NewPCG(seed, 3))
	n := rows * spec.RowElems()
	shape := append([]int{rows}, spec.Shape...)
	if spec.DType == tensor.F32 {
		x := make([]float32, n)
		for i := range x {
			x[i] = float32(rnd.NormFloat64())
		}
		return tensor.Of(spec.Name, x, shape...)
	}
	size := spec.DType.Size()
	data := make([]byte, n*size)
	for i := range n {
		switch at := data[i*size:]; spec.DType {
		case tensor.Bool:
			at[0] = byte(rnd.IntN(2))
		case tensor.F16, tensor.BF16, tensor.F64, tensor.F8E4M3FN, tensor.F8E5M2: // the exponent is in the last byte: at most 0x3f, below 2
			for k := range size {
				at[k] = byte(rnd.IntN(64))
			}
		case tensor.Str:
			at[0] = " aeinorst"[rnd.IntN(9)]
		default: // little-endian
			at[0] = byte(rnd.IntN(64))
		}
	}
	return tensor.Tensor{Name: spec.Name, DType: spec.DType, Shape: shape, Data: data}
}
