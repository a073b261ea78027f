// SPDX-License-Identifier: Apache-2.0

package codec

import (
	"io"

	"github.com/ringbatch/ringbatch/internal/npy"
	"github.com/ringbatch/ringbatch/tensor"
)

// ReadNPY reads an .npy file for an input, with or without the row dimension. NumPy has no
// bfloat16: for such an input the file has the bits as i16.
func ReadNPY(r io.Reader, spec *tensor.Spec, limit int64) (tensor.Tensor, error) {
	a, err := npy.Read(r, limit)
	if err != nil {
		return tensor.Tensor{}, err
	}
	dt, err := tensor.ParseDType(a.DType)
	if err != nil {
		return tensor.Tensor{}, err
	}
	if spec.DType == tensor.BF16 && dt == tensor.I16 {
		dt = tensor.BF16
	}
	shape := a.Shape
	if len(shape) == len(spec.Shape) {
		shape = append([]int{1}, shape...)
	}
	return tensor.Tensor{Name: spec.Name, DType: dt, Shape: shape, Data: a.Data}, nil
}

// WriteNPY writes a contiguous tensor as an .npy file.
func WriteNPY(w io.Writer, t tensor.Tensor) error {
	dt := t.DType
	if dt == tensor.BF16 {
		dt = tensor.I16
	}
	return npy.Write(w, npy.Array{DType: dt.String(), Shape: t.Shape, Data: t.Data})
}
