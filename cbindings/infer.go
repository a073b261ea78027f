package main

// #include "internal.h"
import "C"

import (
	"fmt"
	"time"
	"unsafe"

	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
)

//export rbgo_infer
func rbgo_infer(id C.uint64_t, rows C.uint32_t, inputs, outputs *unsafe.Pointer, timeout, slice C.int64_t, out *C.uint64_t, msg *C.char) C.int {
	*out = 0
	h, err := enter(id)
	if err != nil {
		return result(err, msg)
	}
	defer h.leave()
	if _, err := each(outputs, h.layout.Outputs, "output"); err != nil { // before anything is sent
		return result(err, msg)
	}
	start := shm.Now()
	r, err := h.submit(rows, inputs, timeout, slice, 0)
	if err != nil {
		return result(err, msg)
	}
	left := duration(slice) - time.Duration(shm.Now()-start) // waiting for slots counts
	if err := r.WaitFor(max(0, left)); statusOf(err) == status.ErrTimeout {
		*out = C.uint64_t(r.ID())
		return result(err, msg)
	}
	err = h.collect(r, outputs)
	if err == nil && rows == 1 {
		h.Lend() // the next goes without Go
	}
	return result(err, msg)
}

//export rbgo_submit
func rbgo_submit(id C.uint64_t, rows C.uint32_t, inputs *unsafe.Pointer, timeout C.int64_t, flags C.uint32_t, out *C.uint64_t, msg *C.char) C.int {
	h, err := enter(id)
	if err != nil {
		return result(err, msg)
	}
	defer h.leave()
	r, err := h.submit(rows, inputs, timeout, 0, flags)
	if err == nil {
		*out = C.uint64_t(r.ID())
	}
	return result(err, msg)
}

func (h *clientHandle) submit(rows C.uint32_t, inputs *unsafe.Pointer, timeout, claimFor C.int64_t, flags C.uint32_t) (client.Request, error) {
	if !h.sized {
		return client.Request{}, fmt.Errorf("%w: %s has variable dimensions; claim with their sizes", status.ErrShape, h.info.Name)
	}
	if err := known(flags, C.RB_NOTIFY|C.RB_HOLD); err != nil {
		return client.Request{}, err
	}
	from, err := each(inputs, h.layout.Inputs, "input")
	if err != nil {
		return client.Request{}, err
	}
	r, err := h.claim(int(rows), nil, claimFor)
	if err != nil {
		return r, err
	}
	for k, src := range from {
		dst, err := r.InputBytes(k)
		if err != nil {
			return r, err
		}
		copy(dst, bytesAt(src, len(dst)))
	}
	if flags&C.RB_HOLD != 0 {
		return r, nil
	}
	if err := commit(r, timeout, flags); err != nil {
		_ = r.Release()
		return r, err
	}
	return r, nil
}

//export rbgo_collect
func rbgo_collect(id, req C.uint64_t, outputs *unsafe.Pointer, msg *C.char) C.int {
	h, err := enter(id)
	if err != nil {
		return result(err, msg)
	}
	defer h.leave()
	return result(h.collect(h.RequestByID(uint64(req)), outputs), msg)
}

func (h *clientHandle) collect(r client.Request, outputs *unsafe.Pointer) error {
	if !h.sized {
		return fmt.Errorf("%w: %s has variable dimensions; read its outputs with rb_output", status.ErrShape, h.info.Name)
	}
	to, err := each(outputs, h.layout.Outputs, "output")
	if err != nil {
		return err
	}
	if err := r.Poll(); err != nil {
		switch statusOf(err) {
		case status.ErrNotDone, status.ErrNotCommitted, status.ErrReleased:
		default:
			_ = r.Release()
		}
		return err
	}
	defer r.Release()
	for k, dst := range to {
		src, err := r.OutputBytes(k)
		if err != nil {
			return err
		}
		copy(bytesAt(dst, len(src)), src)
	}
	return nil
}

// each views a caller's pointers, one for each tensor of a side.
func each(p *unsafe.Pointer, side []shm.Plane, what string) ([]unsafe.Pointer, error) {
	if p == nil {
		return nil, fmt.Errorf("%w: the %ss are NULL", status.ErrInvalid, what)
	}
	all := unsafe.Slice(p, len(side))
	for k, at := range all {
		if at == nil {
			return nil, fmt.Errorf("%w: %s %d (%s) is NULL", status.ErrInvalid, what, k, side[k].Spec.Name)
		}
	}
	return all, nil
}
