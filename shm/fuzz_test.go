// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"bytes"
	"errors"
	"testing"
	"unsafe"

	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

var fuzzSignature = tensor.Signature{
	Inputs:  []tensor.Spec{{Name: "x", DType: tensor.F32, Shape: []int{4}}},
	Outputs: []tensor.Spec{{Name: "y", DType: tensor.F32, Shape: []int{2}}},
}

// FuzzCheckHeader gives a peer any first page: its fields are the right ones
// to the byte, or it is refused with a name.
func FuzzCheckHeader(f *testing.F) {
	layout, err := NewLayout(fuzzSignature, 8, 4)
	must.Do(f, err)
	seg, err := CreateOnHeap("fuzz", layout.BoardSize)
	must.Do(f, err)
	layout.WriteHeader(seg, KindBoard, 7)
	const size = int(unsafe.Offsetof(header{}.MaxBatch)) + 4 // what follows is reserved
	right := bytes.Clone(seg.Bytes()[:size])
	f.Add(right)
	for i := 0; i < size; i += 8 {
		wrong := bytes.Clone(right)
		wrong[i] ^= 1
		f.Add(wrong)
	}
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, header []byte) {
		clear(seg.Bytes()[:size])
		copy(seg.Bytes()[:size], header)
		same := bytes.Equal(seg.Bytes()[:size], right)
		err := layout.CheckHeader(seg, KindBoard, 7)
		if err == nil != same {
			t.Fatalf("%x: %v", header, err)
		}
		if err != nil && !errors.Is(err, status.ErrLayout) && !errors.Is(err, status.ErrVersion) {
			t.Fatalf("unnamed: %v", err)
		}
	})
}

// FuzzLayout lays out any two tensors: planes follow one another, inside
// the segment, or the model is refused with a name.
func FuzzLayout(f *testing.F) {
	f.Add("x:f32[3,224,224]", "y:f32[1000]", 4096, 32)
	f.Add("x:i32[<=512]", "y:u8[1]", 1, 1)
	f.Add("x:f64[1048576,1024]", "y:f64[1048576,1024]", MaxSlots, MaxBatchRows)
	f.Add("x:f32[4]", "x:f32[4]", -1, 0)
	f.Fuzz(func(t *testing.T, in, out string, slots, maxBatch int) {
		x, err1 := tensor.ParseSpec(in)
		y, err2 := tensor.ParseSpec(out)
		if err1 != nil || err2 != nil {
			return
		}
		l, err := NewLayout(tensor.Signature{Inputs: []tensor.Spec{x}, Outputs: []tensor.Spec{y}}, slots, maxBatch)
		if err != nil {
			var s status.Code
			if !errors.As(err, &s) {
				t.Fatalf("unnamed: %v", err)
			}
			return
		}
		end := int64(segmentHeader)
		for _, p := range []Plane{l.Inputs[0], l.Outputs[0]} {
			if p.Offset < end || p.Stride < 1 || p.Offset%pageSize != 0 {
				t.Fatalf("plane at %d, stride %d, after %d", p.Offset, p.Stride, end)
			}
			end = p.Offset + p.Stride*int64(slots)
		}
		if end > l.PlanesSize || l.PlanesSize < 0 || l.reasonsAt+int64(slots)*reasonBytes > l.BoardSize {
			t.Fatalf("planes end at %d of %d, reasons at %d of %d", end, l.PlanesSize, l.reasonsAt, l.BoardSize)
		}
	})
}
