package main

// #include "internal.h"
import "C"

import (
	"errors"
	"fmt"
	"unsafe"

	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/worker"
)

// batchHandle is a batch in both worlds. The C struct and its arrays are
// allocated once, for the largest batch, and used again and again.
type batchHandle struct {
	b        *worker.Batch // nil: not in use
	c        *C.rb_batch
	requests []C.rb_member
	slots    []uint32
	runs     []C.rb_run
}

// show makes a batch visible to C.
func (h *workerHandle) show(b *worker.Batch) *batchHandle {
	v := h.spare()
	v.b = b
	c := v.c
	c.id, c.requests, c.rows = C.uint64_t(b.ID()), C.uint32_t(b.Len()), C.uint32_t(b.Rows())
	c.runs, c.pad_to = C.uint32_t(len(b.Runs())), C.uint32_t(b.PadTo())
	for i, d := range b.Dims() {
		c.dims[i] = C.uint32_t(d)
	}
	copy(v.slots, b.Slots())
	for i, r := range b.Runs() {
		v.runs[i] = C.rb_run{slot: C.uint32_t(r.Slot), row: C.uint32_t(r.Row), rows: C.uint32_t(r.Rows)}
	}
	for i := range b.Len() {
		q, m := b.Request(i), &v.requests[i]
		m.row, m.rows = C.uint32_t(q.Row), C.uint32_t(q.Rows)
		m.deadline, m.committed = C.int64_t(q.Deadline), C.int64_t(q.Committed)
		for j, d := range q.Dims() {
			m.dims[j] = C.uint32_t(d)
		}
	}
	return v
}

func (h *workerHandle) spare() *batchHandle {
	for _, v := range h.batches {
		if v.b == nil {
			return v
		}
	}
	n := h.MaxBatchSize()
	c := (*C.rb_batch)(C.calloc(1, C.sizeof_rb_batch))
	requests := (*C.rb_member)(C.calloc(C.size_t(n), C.sizeof_rb_member))
	slots := (*C.uint32_t)(C.calloc(C.size_t(n), C.sizeof_uint32_t))
	runs := (*C.rb_run)(C.calloc(C.size_t(n), C.sizeof_rb_run))
	c.request, c.slot, c.run = requests, slots, runs
	c.worker, c.base = C.rb_worker(h.id), (*C.uint8_t)(h.Planes().AddressOf(0))
	c.place, c.ragged = C.uint32_t(len(h.batches)), flag(h.Settings().Ragged)
	v := &batchHandle{
		c: c, requests: unsafe.Slice(requests, n), slots: unsafe.Slice((*uint32)(slots), n), runs: unsafe.Slice(runs, n),
	}
	h.batches = append(h.batches, v)
	return v
}

func flag(b bool) C.uint32_t {
	if b {
		return 1
	}
	return 0
}

func (v *batchHandle) free() {
	C.free(unsafe.Pointer(v.c.request))
	C.free(unsafe.Pointer(v.c.slot))
	C.free(unsafe.Pointer(v.c.run))
	C.free(unsafe.Pointer(v.c))
	v.c, v.b = nil, nil
}

// with finds the batch that a C struct stands for and does something to it.
func withBatch(c *C.rb_batch, msg *C.char, f func(*batchHandle) error) C.int {
	h, err := use(c.worker)
	if err != nil {
		return result(err, msg)
	}
	defer h.using.Unlock()
	if int64(c.place) >= int64(len(h.batches)) || h.batches[c.place].c != c || h.batches[c.place].b == nil {
		return result(fmt.Errorf("%w: no such batch, or it was completed", status.ErrReleased), msg)
	}
	return result(f(h.batches[c.place]), msg)
}

func (v *batchHandle) column(side C.int, k C.uint32_t) (worker.Column, error) {
	var z worker.Column
	if _, _, err := plane(v.b.Layout(), side, k); err != nil {
		return z, err
	}
	if side == C.RB_INPUT {
		return v.b.Input(int(k)), nil
	}
	return v.b.Output(int(k)), nil
}

func (v *batchHandle) check(i C.uint32_t) error {
	if int64(i) >= int64(v.b.Len()) {
		return fmt.Errorf("%w: request %d of a batch of %d", status.ErrInvalid, i, v.b.Len())
	}
	return nil
}

//export rbgo_batch_run
func rbgo_batch_run(c *C.rb_batch, side C.int, k, i C.uint32_t, out *C.rb_view, msg *C.char) C.int {
	return withBatch(c, msg, func(v *batchHandle) error {
		col, err := v.column(side, k)
		if err != nil {
			return err
		}
		if int64(i) >= int64(len(v.b.Runs())) {
			return fmt.Errorf("%w: run %d of a batch of %d", status.ErrInvalid, i, len(v.b.Runs()))
		}
		if side == C.RB_INPUT && v.b.Ragged() && v.b.Len() > 1 && len(col.Spec().Variable) > 0 {
			return fmt.Errorf("%w: the batch is ragged: take %q row by row", status.ErrShape, col.Spec().Name)
		}
		fillView(out, col.Run(int(i)))
		return nil
	})
}

//export rbgo_batch_row
func rbgo_batch_row(c *C.rb_batch, side C.int, k, i C.uint32_t, data *unsafe.Pointer, bytes *C.uint64_t, msg *C.char) C.int {
	return withBatch(c, msg, func(v *batchHandle) error {
		col, err := v.column(side, k)
		if err != nil {
			return err
		}
		if int64(i) >= int64(v.b.Rows()) {
			return fmt.Errorf("%w: row %d of a batch of %d; padding has no memory", status.ErrRows, i, v.b.Rows())
		}
		row := col.Bytes(int(i))
		*data, *bytes = unsafe.Pointer(unsafe.SliceData(row)), C.uint64_t(len(row))
		return nil
	})
}

//export rbgo_batch_shape
func rbgo_batch_shape(c *C.rb_batch, i, k C.uint32_t, shape *C.uint64_t, msg *C.char) C.int {
	return withBatch(c, msg, func(v *batchHandle) error {
		if _, err := v.column(C.RB_INPUT, k); err != nil {
			return err
		}
		if err := v.check(i); err != nil {
			return err
		}
		out := unsafe.Slice(shape, C.RB_MAX_RANK)
		for j, d := range v.b.InputShape(int(i), int(k)) {
			out[j] = C.uint64_t(d)
		}
		return nil
	})
}

//export rbgo_batch_set_output_dims
func rbgo_batch_set_output_dims(c *C.rb_batch, i C.uint32_t, dims *C.uint32_t, ndims C.uint32_t, msg *C.char) C.int {
	return withBatch(c, msg, func(v *batchHandle) error {
		if err := v.check(i); err != nil {
			return err
		}
		return v.b.SetOutputDims(int(i), sizes(dims, ndims)...)
	})
}

//export rbgo_batch_set_row_dims
func rbgo_batch_set_row_dims(c *C.rb_batch, row C.uint32_t, dims *C.uint32_t, ndims C.uint32_t, msg *C.char) C.int {
	return withBatch(c, msg, func(v *batchHandle) error {
		if int64(row) >= int64(v.b.Rows()) {
			return fmt.Errorf("%w: row %d of a batch of %d", status.ErrRows, row, v.b.Rows())
		}
		return v.b.SetRowDims(int(row), sizes(dims, ndims)...)
	})
}

func sizes(dims *C.uint32_t, ndims C.uint32_t) (all []int) {
	for _, d := range list[uint32](dims, ndims) {
		all = append(all, int(d))
	}
	return all
}

//export rbgo_batch_fail
func rbgo_batch_fail(c *C.rb_batch, i C.uint32_t, reason, msg *C.char) C.int {
	return withBatch(c, msg, func(v *batchHandle) error {
		if err := v.check(i); err != nil {
			return err
		}
		v.b.Fail(int(i), errors.New(text(reason)))
		return nil
	})
}

//export rbgo_batch_fail_all
func rbgo_batch_fail_all(c *C.rb_batch, reason, msg *C.char) C.int {
	return withBatch(c, msg, func(v *batchHandle) error {
		v.b.FailAll(errors.New(text(reason)))
		return nil
	})
}

//export rbgo_batch_complete
func rbgo_batch_complete(c *C.rb_batch, msg *C.char) C.int {
	return withBatch(c, msg, func(v *batchHandle) error {
		v.b.Complete()
		v.b = nil
		return nil
	})
}
