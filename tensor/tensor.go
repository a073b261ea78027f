// SPDX-License-Identifier: Apache-2.0

package tensor

import (
	"cmp"
	"fmt"

	"github.com/ringbatch/ringbatch/status"
)

// Tensor is a number of rows of one tensor: a view into shared memory, or memory of the
// caller. The first dimension of Shape is the number of rows.
type Tensor struct {
	Name  string
	DType DType
	Shape []int
	Data  []byte
	// Stride is the distance in bytes between the starts of two rows; 0 means that the
	// rows are contiguous.
	Stride int
}

// Of makes a tensor of a slice, without a copy. The first size of shape is the number of
// rows. The name may be empty if tensors are given in signature order.
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

// Contiguous reports whether there are no gaps between the rows.
func (t Tensor) Contiguous() bool {
	return t.Rows() <= 1 || t.Stride == 0 || t.Stride == t.RowBytes() || t.RowBytes() == 0
}

// Row is a tensor of one row, over the same memory.
func (t Tensor) Row(i int) Tensor {
	if i < 0 || i >= t.Rows() {
		panic(fmt.Sprintf("tensor: row %d of a tensor of %d rows", i, t.Rows()))
	}
	size := t.RowBytes()
	stride := cmp.Or(t.Stride, size)
	shape := append([]int{1}, t.Shape[1:]...)
	return Tensor{Name: t.Name, DType: t.DType, Shape: shape, Data: t.Data[i*stride : i*stride+size : i*stride+size]}
}

// As is the tensor's elements as a Go slice over the same memory. It returns an error if
// the tensor has another element type, or if there are gaps between the rows (take them
// one by one with Row).
func As[T Element](t Tensor) ([]T, error) {
	if want := DTypeOf[T](); want != t.DType {
		return nil, fmt.Errorf("%w: tensor %q is %s, not %s", status.ErrDType, t.Name, t.DType, want)
	}
	if !t.Contiguous() {
		return nil, fmt.Errorf("%w: the rows of %q lie %d bytes apart but are %d long; take them with Row", status.ErrShape,
			t.Name, t.Stride, t.RowBytes())
	}
	n := t.Rows() * t.RowBytes()
	if n < 0 || n > len(t.Data) {
		return nil, fmt.Errorf("%w: tensor %q of shape %v takes %d bytes, it has %d", status.ErrSize, t.Name, t.Shape, n, len(t.Data))
	}
	return sliceOf[T](t.Data[:n])
}

// Copy copies all rows from src to dst. Both must have the same dtype and shape.
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
	ds, ss := cmp.Or(dst.Stride, size), cmp.Or(src.Stride, size)
	for i := range src.Rows() {
		copy(dst.Data[i*ds:i*ds+size], src.Data[i*ss:i*ss+size])
	}
	return nil
}

// CheckInput checks a tensor against a spec. It returns the number of rows, and dims with
// the actual sizes of the tensor's variable dimensions appended.
func CheckInput(spec *Spec, t *Tensor, dims []uint32) (rows int, _ []uint32, err error) {
	fail := func(code status.Code, format string, a ...any) (int, []uint32, error) {
		return 0, dims, fmt.Errorf("%w: input %q %s", code, spec.Name, fmt.Sprintf(format, a...))
	}
	if t.DType != spec.DType {
		return fail(status.ErrDType, "is %s, got %s", spec.DType, t.DType)
	}
	if len(t.Shape) != len(spec.Shape)+1 {
		return fail(status.ErrShape, "is rows × %v, got %v", spec.Shape, t.Shape)
	}
	v := 0
	for i, max := range spec.Shape {
		got := t.Shape[i+1]
		if v < len(spec.Variable) && spec.Variable[v] == i {
			v++
			if got < 0 || got > max {
				return fail(status.ErrShape, "dimension %d is 0..%d, got %d", i, max, got)
			}
			dims = append(dims, uint32(got))
		} else if got != max {
			return fail(status.ErrShape, "is rows × %v, got %v", spec.Shape, t.Shape)
		}
	}
	if t.Shape[0] < 1 {
		return fail(status.ErrRows, "has %d rows", t.Shape[0])
	}
	size := t.RowBytes()
	if t.Stride == 0 && len(t.Data) != t.Rows()*size {
		return fail(status.ErrSize, "of shape %v takes %d bytes, got %d", t.Shape, t.Rows()*size, len(t.Data))
	}
	if t.Stride != 0 && (t.Stride < size || len(t.Data) < size || (len(t.Data)-size)/t.Stride < t.Rows()-1) {
		return fail(status.ErrSize, "of shape %v does not fit %d bytes in rows %d bytes apart", t.Shape, len(t.Data), t.Stride)
	}
	return t.Shape[0], dims, nil
}
