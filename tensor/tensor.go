// SPDX-License-Identifier: Apache-2.0

package tensor

import (
	"fmt"

	"github.com/ringbatch/ringbatch/status"
)

// Tensor is some rows of one tensor: a view into the mapping, or a caller's
// own memory. Shape includes the row dimension first.
type Tensor struct {
	Name  string
	DType DType
	Shape []int
	Data  []byte
	// Stride is the distance in bytes between rows; where it equals the size
	// of a row the tensor is contiguous. 0 means contiguous.
	Stride int
}

// Of wraps a caller's slice as a tensor of the given shape (rows first). The
// name may be empty where tensors are given in signature order.
func Of[T Element](name string, data []T, shape ...int) Tensor {
	return Tensor{Name: name, DType: DTypeOf[T](), Shape: shape, Data: bytesOf(data)}
}

// Rows is the number of rows.
func (t Tensor) Rows() int {
	if len(t.Shape) == 0 {
		return 0
	}
	return t.Shape[0]
}

// RowBytes is the size of one row.
func (t Tensor) RowBytes() int {
	if len(t.Shape) == 0 {
		return 0
	}
	return elems(t.Shape[1:]) * t.DType.Size()
}

// Contiguous reports whether the rows follow one another without a gap.
func (t Tensor) Contiguous() bool {
	return t.Rows() <= 1 || t.Stride == 0 || t.Stride == t.RowBytes() || t.RowBytes() == 0
}

// Row is one row as a tensor of its own.
func (t Tensor) Row(i int) Tensor {
	if i < 0 || i >= t.Rows() {
		panic(fmt.Sprintf("tensor: row %d of a tensor of %d rows", i, t.Rows()))
	}
	size, stride := t.RowBytes(), t.Stride
	if stride == 0 {
		stride = size
	}
	shape := append([]int{1}, t.Shape[1:]...)
	return Tensor{Name: t.Name, DType: t.DType, Shape: shape, Data: t.Data[i*stride : i*stride+size : i*stride+size]}
}

// As gives the elements as a Go slice over the same memory. It is an error if
// the tensor holds another type, or if its rows are not contiguous (take them
// one by one with Row).
func As[T Element](t Tensor) ([]T, error) {
	if want := DTypeOf[T](); want != t.DType {
		return nil, fmt.Errorf("%w: tensor %q is %s, not %s", status.ErrDType, t.Name, t.DType, want)
	}
	if !t.Contiguous() {
		return nil, fmt.Errorf("%w: the rows of %q lie %d bytes apart but are %d long; take them with Row", status.ErrShape, t.Name, t.Stride, t.RowBytes())
	}
	n := t.Rows() * t.RowBytes()
	if n < 0 || n > len(t.Data) {
		return nil, fmt.Errorf("%w: tensor %q of shape %v takes %d bytes, it has %d", status.ErrSize, t.Name, t.Shape, n, len(t.Data))
	}
	return sliceOf[T](t.Data[:n])
}

// Copy copies rows from src into dst, row by row where either is strided.
// Both must have the same dtype and shape.
func Copy(dst, src Tensor) error {
	if dst.DType != src.DType {
		return fmt.Errorf("%w: tensor %q is %s, got %s", status.ErrDType, dst.Name, dst.DType, src.DType)
	}
	size := src.RowBytes()
	if dst.Rows() != src.Rows() || dst.RowBytes() != size {
		return fmt.Errorf("%w: tensor %q is %v, got %v", status.ErrShape, dst.Name, dst.Shape, src.Shape)
	}
	if dst.Contiguous() && src.Contiguous() {
		copy(dst.Data[:src.Rows()*size], src.Data[:src.Rows()*size])
		return nil
	}
	ds, ss := dst.Stride, src.Stride
	if ds == 0 {
		ds = size
	}
	if ss == 0 {
		ss = size
	}
	for i := range src.Rows() {
		copy(dst.Data[i*ds:i*ds+size], src.Data[i*ss:i*ss+size])
	}
	return nil
}

// CheckInput compares a caller's tensor with a spec and gives its rows and,
// appended to dims, the actual sizes of its variable dimensions.
func CheckInput(spec *Spec, t *Tensor, dims []uint32) (rows int, _ []uint32, err error) {
	if t.DType != spec.DType {
		return 0, dims, fmt.Errorf("%w: input %q is %s, got %s", status.ErrDType, spec.Name, spec.DType, t.DType)
	}
	if len(t.Shape) != len(spec.Shape)+1 {
		return 0, dims, fmt.Errorf("%w: input %q is rows × %v, got %v", status.ErrShape, spec.Name, spec.Shape, t.Shape)
	}
	v := 0
	for i, max := range spec.Shape {
		got := t.Shape[i+1]
		if v < len(spec.Variable) && spec.Variable[v] == i {
			v++
			if got < 0 || got > max {
				return 0, dims, fmt.Errorf("%w: input %q dimension %d is 0..%d, got %d", status.ErrShape, spec.Name, i, max, got)
			}
			dims = append(dims, uint32(got))
		} else if got != max {
			return 0, dims, fmt.Errorf("%w: input %q is rows × %v, got %v", status.ErrShape, spec.Name, spec.Shape, t.Shape)
		}
	}
	if t.Shape[0] < 1 {
		return 0, dims, fmt.Errorf("%w: input %q has %d rows", status.ErrRows, spec.Name, t.Shape[0])
	}
	if t.Stride == 0 && len(t.Data) != t.Rows()*t.RowBytes() {
		return 0, dims, fmt.Errorf("%w: input %q of shape %v takes %d bytes, got %d", status.ErrSize, spec.Name, t.Shape, t.Rows()*t.RowBytes(), len(t.Data))
	}
	if t.Stride != 0 && (t.Stride < t.RowBytes() || len(t.Data) < t.RowBytes() || (len(t.Data)-t.RowBytes())/t.Stride < t.Rows()-1) {
		return 0, dims, fmt.Errorf("%w: input %q of shape %v does not fit %d bytes in rows %d bytes apart", status.ErrSize, spec.Name, t.Shape, len(t.Data), t.Stride)
	}
	return t.Shape[0], dims, nil
}
