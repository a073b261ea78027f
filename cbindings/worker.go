package main

// #include "internal.h"
import "C"

import (
	"fmt"
	"strings"
	"sync"
	"unsafe"

	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/worker"
)

// workerHandle is a worker with its batches as C sees them.
type workerHandle struct {
	*worker.Worker
	id      uint64
	model   string
	using   sync.Mutex // one thread at a time; never waited for
	batches []*batchHandle
	notes   *C.char

	mu    sync.Mutex
	holds int // maps that are held, plus one until it is closed
}

// use finds a worker and refuses a second thread.
func use(id C.uint64_t) (*workerHandle, error) {
	h := workers.get(uint64(id))
	if h == nil {
		return nil, status.ErrClosed
	}
	if !h.using.TryLock() {
		return nil, fmt.Errorf("%w: another thread is using this worker", status.ErrInvalid)
	}
	if workers.get(uint64(id)) != h { // closed meanwhile
		h.using.Unlock()
		return nil, status.ErrClosed
	}
	return h, nil
}

// drop gives up one hold; the last one unmaps.
func (h *workerHandle) drop() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.holds--; h.holds == 0 {
		h.Close()
	}
}

//export rbgo_worker_attach
func rbgo_worker_attach(model, signature *C.char, o *C.rb_worker_options, out *C.rb_worker, msg *C.char) C.int {
	cfg, timeout, err := workerConfig(text(model), text(signature), o)
	if err != nil {
		return result(err, msg)
	}
	ctx, cancel := bounded(timeout)
	defer cancel()
	w, err := worker.Attach(ctx, cfg)
	if err != nil {
		return result(err, msg)
	}
	h := &workerHandle{Worker: w, model: cfg.Model, holds: 1, notes: C.CString(strings.Join(w.Notes(), "\n"))}
	h.using.Lock()
	h.id = workers.put(h)
	h.using.Unlock()
	*out = C.rb_worker(h.id)
	return C.RB_OK
}

func workerConfig(model, signature string, given *C.rb_worker_options) (cfg worker.Config, timeout C.int64_t, err error) {
	var o C.rb_worker_options
	if given != nil {
		if given.size != C.sizeof_rb_worker_options {
			return cfg, 0, fmt.Errorf("%w: rb_worker_options.size is %d, expected %d", status.ErrVersion, given.size, C.sizeof_rb_worker_options)
		}
		o = *given
	}
	cfg = worker.Config{
		Model: model, Socket: socket(o.socket), Name: text(o.name), GPU: text(o.gpu), Depth: int(o.depth), Weight: int(o.weight),
	}
	if cfg.Policy, err = policy.Parse(text(o.policy)); err != nil {
		return cfg, 0, err
	}
	switch {
	case o.pad_to != 0:
		cfg.Pad, cfg.PadTo = "fixed", int(o.pad_to)
	case o.pad_preferred != 0:
		cfg.Pad = "preferred"
	}
	if o.timeout == 0 {
		o.timeout = C.int64_t(defaultTimeout)
	}
	inputs, outputs, ok := strings.Cut(signature, "->")
	if !ok {
		return cfg, 0, fmt.Errorf("%w: signature %q has no \"->\"", status.ErrInvalid, signature)
	}
	cfg.Signature, err = tensor.ParseSignature(strings.Fields(inputs), strings.Fields(outputs))
	return cfg, o.timeout, err
}

//export rbgo_worker_close
func rbgo_worker_close(id C.uint64_t, msg *C.char) C.int {
	h, err := use(id)
	if err != nil {
		return result(err, msg)
	}
	defer h.using.Unlock()
	workers.remove(uint64(id))
	h.Leave()
	for _, b := range h.batches {
		b.free()
	}
	C.free(unsafe.Pointer(h.notes))
	h.drop()
	return C.RB_OK
}

//export rbgo_worker_notes
func rbgo_worker_notes(id C.uint64_t, out **C.char, msg *C.char) C.int {
	h, err := use(id)
	if err != nil {
		return result(err, msg)
	}
	defer h.using.Unlock()
	*out = h.notes
	return C.RB_OK
}

//export rbgo_worker_model
func rbgo_worker_model(id C.uint64_t, out *C.rb_model, msg *C.char) C.int {
	h, err := use(id)
	if err != nil {
		return result(err, msg)
	}
	defer h.using.Unlock()
	l, p := h.Layout(), h.Settings()
	*out = C.rb_model{
		inputs: C.uint32_t(len(l.Inputs)), outputs: C.uint32_t(len(l.Outputs)), max_batch_size: C.uint32_t(h.MaxBatchSize()),
		slots: C.uint32_t(l.Slots), levels: C.uint32_t(p.LevelCount()), wait_time: C.int64_t(p.WaitTime),
	}
	fillName(out.name[:], h.model)
	return C.RB_OK
}

//export rbgo_worker_tensor
func rbgo_worker_tensor(id C.uint64_t, side C.int, k C.uint32_t, out *C.rb_tensor, msg *C.char) C.int {
	h, err := use(id)
	if err != nil {
		return result(err, msg)
	}
	defer h.using.Unlock()
	p, _, err := plane(h.Layout(), side, k)
	if err == nil {
		fillTensor(out, p)
	}
	return result(err, msg)
}

//export rbgo_worker_map
func rbgo_worker_map(id C.uint64_t, out *C.rb_map, msg *C.char) C.int {
	h, err := use(id)
	if err != nil {
		return result(err, msg)
	}
	defer h.using.Unlock()
	h.mu.Lock()
	h.holds++
	h.mu.Unlock()
	*out = C.rb_map{
		id: C.uint64_t(maps.put(&mapHandle{h.drop})), base: (*C.uint8_t)(h.Planes().AddressOf(0)), bytes: C.uint64_t(h.Planes().Size()),
	}
	return C.RB_OK
}

//export rbgo_worker_next
func rbgo_worker_next(id C.uint64_t, timeout C.int64_t, out **C.rb_batch, msg *C.char) C.int {
	h, err := use(id)
	if err != nil {
		return result(err, msg)
	}
	defer h.using.Unlock()
	b, err := h.NextFor(duration(timeout))
	if err != nil {
		return result(err, msg)
	}
	*out = h.show(b).c
	return C.RB_OK
}
