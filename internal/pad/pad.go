// SPDX-License-Identifier: Apache-2.0

// Package pad copies a row into a larger row: the bucket to which its sizes are rounded up.
package pad

import (
	"fmt"
	"slices"

	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

// Bucket rounds n up to the next of the ascending sizes. If n is above all sizes, it
// stays as it is.
func Bucket(sizes []uint32, n uint32) uint32 {
	for _, s := range sizes {
		if n <= s {
			return s
		}
	}
	return n
}

// Copy copies src into dst, whose rows may be larger in any dimension. The other elements
// of dst become zero.
func Copy(dst, src tensor.Tensor) error {
	if dst.DType != src.DType {
		return fmt.Errorf("%w: tensor %q is %s, got %s", status.ErrDType, dst.Name, dst.DType, src.DType)
	}
	if len(dst.Shape) != len(src.Shape) || dst.Rows() != src.Rows() {
		return fmt.Errorf("%w: tensor %q is %v, got %v", status.ErrShape, dst.Name, dst.Shape, src.Shape)
	}
	same := true
	for i, d := range dst.Shape {
		if src.Shape[i] > d {
			return fmt.Errorf("%w: tensor %q is %v, got %v", status.ErrShape, dst.Name, dst.Shape, src.Shape)
		}
		same = same && src.Shape[i] == d
	}
	if same {
		return tensor.Copy(dst, src)
	}
	for i := range dst.Rows() {
		d, s := dst.Row(i), src.Row(i)
		Corner(d.Data, s.Data, dst.Shape[1:], src.Shape[1:], dst.DType.Size())
	}
	return nil
}

// Corner copies the elements that both shapes of a row have; the other elements of dst
// become zero. dst and src may be the same memory if to is not larger than from in any
// dimension: no element moves towards the end.
func Corner(dst, src []byte, to, from []int, elem int) {
	if len(to) == 0 {
		copy(dst[:elem], src)
		return
	}
	ds, ss := elem, elem // bytes of one step in the outermost dimension
	for i := 1; i < len(to); i++ {
		ds *= to[i]
		ss *= from[i]
	}
	n := min(to[0], from[0])
	if slices.Equal(to[1:], from[1:]) { // one contiguous block
		copy(dst[:n*ds], src)
	} else {
		for i := range n {
			Corner(dst[i*ds:(i+1)*ds], src[i*ss:(i+1)*ss], to[1:], from[1:], elem)
		}
	}
	clear(dst[n*ds : to[0]*ds])
}
