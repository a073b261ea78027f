package main

// #include "internal.h"
import "C"

import (
	"fmt"
	"unsafe"

	"github.com/ringbatch/ringbatch/internal/control"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

// planes picks a side of a model.
func planes(l *shm.Layout, side C.int) ([]shm.Plane, error) {
	switch side {
	case C.RB_INPUT:
		return l.Inputs, nil
	case C.RB_OUTPUT:
		return l.Outputs, nil
	}
	return nil, fmt.Errorf("%w: side %d, must be RB_INPUT or RB_OUTPUT", status.ErrInvalid, side)
}

// plane picks a tensor of a model, and tells where its sizes begin among the
// variable dimensions of its side.
func plane(l *shm.Layout, side C.int, k C.uint32_t) (p *shm.Plane, dimsAt int, err error) {
	list, err := planes(l, side)
	if err != nil {
		return nil, 0, err
	}
	if int64(k) >= int64(len(list)) {
		return nil, 0, fmt.Errorf("%w: tensor %d of %d", status.ErrInvalid, k, len(list))
	}
	for j := range int(k) {
		dimsAt += len(list[j].Spec.Variable)
	}
	return &list[k], dimsAt, nil
}

func fillTensor(t *C.rb_tensor, p *shm.Plane) {
	*t = C.rb_tensor{
		dtype: C.uint32_t(p.Spec.DType), rank: C.uint32_t(len(p.Spec.Shape)), row_bytes: C.uint64_t(p.Spec.RowBytes()),
		offset: C.uint64_t(p.Offset), stride: C.uint64_t(p.Stride),
	}
	fillName(t.name[:], p.Spec.Name)
	for i, d := range p.Spec.Shape {
		t.shape[i] = C.uint64_t(d)
	}
	for _, v := range p.Spec.Variable {
		t.variable |= 1 << v
	}
}

func fillView(v *C.rb_view, t tensor.Tensor) {
	*v = C.rb_view{
		data: unsafe.Pointer(&t.Data[0]), bytes: C.uint64_t(len(t.Data)), stride: C.uint64_t(t.Stride),
		dtype: C.uint32_t(t.DType), rank: C.uint32_t(len(t.Shape)),
	}
	for i, d := range t.Shape {
		v.shape[i] = C.uint64_t(d)
	}
}

func fillName(dst []C.char, name string) {
	for i := range min(len(name), len(dst)-1) {
		dst[i] = C.char(name[i])
	}
}

// bytesAt views a caller's memory.
func bytesAt(p unsafe.Pointer, n int) []byte { return unsafe.Slice((*byte)(p), n) }

// list views a caller's array.
func list[T, P any](p *P, n C.uint32_t) []T {
	if n == 0 || p == nil {
		return nil
	}
	return unsafe.Slice((*T)(unsafe.Pointer(p)), int(n))
}

// text copies a caller's string; NULL is "".
func text(s *C.char) string {
	if s == nil {
		return ""
	}
	return C.GoString(s)
}

// socket is the one given, or the environment's. C's environment, not Go's:
// that is a copy from when the process was started.
func socket(given *C.char) string {
	if s := text(given); s != "" {
		return s
	}
	name := C.CString(control.SocketEnv)
	defer C.free(unsafe.Pointer(name))
	return text(C.getenv(name))
}
