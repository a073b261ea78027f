package main

// #include "internal.h"
import "C"

import (
	"context"
	"fmt"
	"runtime"
	"sync/atomic"
	"time"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

const defaultTimeout = 10 * time.Second

type clientHandle struct {
	*client.Client
	info   client.Model // of the first attachment: what the signature tells is true of all
	layout *shm.Layout  // likewise; a restarted broker may have other slots, and so other offsets
	sized  bool         // no variable dimensions: whole requests in one call
	inside atomic.Int64
	closed atomic.Bool
}

// enter finds a client and keeps it from being taken apart until leave.
func enter(id C.uint64_t) (*clientHandle, error) {
	h := clients.get(uint64(id))
	if h == nil {
		return nil, status.ErrClosed
	}
	h.inside.Add(1)
	if h.closed.Load() {
		h.leave()
		return nil, status.ErrClosed
	}
	return h, nil
}

func (h *clientHandle) leave() { h.inside.Add(-1) }

// bounded is a context for a timeout of the C side.
func bounded(timeout C.int64_t) (context.Context, context.CancelFunc) {
	if timeout < 0 {
		return context.WithCancel(context.Background())
	}
	return context.WithTimeout(context.Background(), time.Duration(timeout))
}

//export rbgo_connect
func rbgo_connect(model *C.char, o *C.rb_connect_options, out *C.rb_client, msg *C.char) C.int {
	h := &clientHandle{}
	id := clients.put(h) // nobody knows it yet
	if err := h.connect(text(model), o, express(id)); err != nil {
		clients.remove(id)
		return result(err, msg)
	}
	h.openExpress(id)
	*out = C.rb_client(id)
	return C.RB_OK
}

func (h *clientHandle) connect(model string, given *C.rb_connect_options, x *shm.Express) error {
	var o C.rb_connect_options
	if given != nil {
		if given.size != C.sizeof_rb_connect_options {
			return fmt.Errorf("%w: rb_connect_options.size is %d, expected %d", status.ErrVersion, given.size, C.sizeof_rb_connect_options)
		}
		o = *given
	}
	opts := []client.Option{client.WithSocket(socket(o.socket)), client.WithName(text(o.name)), client.WithTiming(), client.WithExpress(x)}
	if o.window > 0 {
		opts = append(opts, client.WithWindow(int(o.window)))
	}
	if o.wait != 0 {
		opts = append(opts, client.WaitForModel())
	}
	if o.timeout == 0 {
		o.timeout = C.int64_t(defaultTimeout)
	}
	ctx, cancel := bounded(o.timeout)
	defer cancel()
	c, err := client.Dial(ctx, model, opts...)
	if err != nil {
		return err
	}
	h.Client, h.info = c, c.Model()
	h.layout, err = shm.NewLayout(h.info.Signature, h.info.Slots, h.info.MaxBatchSize)
	if err != nil {
		c.Close()
		return err
	}
	h.sized = tensor.VariableDims(h.info.Signature.Inputs)+tensor.VariableDims(h.info.Signature.Outputs) == 0
	return nil
}

//export rbgo_close
func rbgo_close(id C.uint64_t, msg *C.char) C.int {
	h := clients.get(uint64(id))
	if h == nil || !h.closed.CompareAndSwap(false, true) {
		return result(status.ErrClosed, msg)
	}
	_ = h.Close() // wakes everybody who waits
	for h.inside.Load() > 0 {
		runtime.Gosched()
		time.Sleep(50 * time.Microsecond)
	}
	closeExpress(uint64(id))
	h.ReleaseAll()
	clients.remove(uint64(id)) // last: the next one with this number has its express too
	return C.RB_OK
}

//export rbgo_client_model
func rbgo_client_model(id C.uint64_t, out *C.rb_model, msg *C.char) C.int {
	h, err := enter(id)
	if err != nil {
		return result(err, msg)
	}
	defer h.leave()
	info := h.Model()
	*out = C.rb_model{
		inputs: C.uint32_t(len(h.layout.Inputs)), outputs: C.uint32_t(len(h.layout.Outputs)),
		max_batch_size: C.uint32_t(info.MaxBatchSize), slots: C.uint32_t(info.Slots), window: C.uint32_t(info.Window),
		levels: C.uint32_t(info.Levels), wait_time: C.int64_t(info.WaitTime),
	}
	fillName(out.name[:], info.Name)
	return C.RB_OK
}

//export rbgo_client_tensor
func rbgo_client_tensor(id C.uint64_t, side C.int, k C.uint32_t, out *C.rb_tensor, msg *C.char) C.int {
	h, err := enter(id)
	if err != nil {
		return result(err, msg)
	}
	defer h.leave()
	info := h.Model()
	layout, err := shm.NewLayout(info.Signature, info.Slots, info.MaxBatchSize)
	if err != nil {
		return result(err, msg)
	}
	p, _, err := plane(layout, side, k)
	if err == nil {
		fillTensor(out, p)
	}
	return result(err, msg)
}

//export rbgo_client_map
func rbgo_client_map(id C.uint64_t, out *C.rb_map, msg *C.char) C.int {
	h, err := enter(id)
	if err != nil {
		return result(err, msg)
	}
	defer h.leave()
	m, err := h.Map()
	if err == nil {
		fillMap(out, m)
	}
	return result(err, msg)
}

func fillMap(out *C.rb_map, m *client.Mapping) {
	*out = C.rb_map{
		id: C.uint64_t(maps.put(&mapHandle{m.Close})), base: (*C.uint8_t)(m.Segment().AddressOf(0)),
		bytes: C.uint64_t(m.Segment().Size()), attachment: C.uint32_t(m.Attachment()),
	}
}

//export rbgo_map_release
func rbgo_map_release(id C.uint64_t, msg *C.char) C.int {
	m := maps.remove(uint64(id))
	if m == nil {
		return result(status.ErrReleased, msg)
	}
	m.release()
	return C.RB_OK
}

//export rbgo_client_fd
func rbgo_client_fd(id C.uint64_t, out *C.int, msg *C.char) C.int {
	h, err := enter(id)
	if err != nil {
		return result(err, msg)
	}
	defer h.leave()
	n, err := h.Notifier()
	if err == nil {
		*out = C.int(n.FD())
	}
	return result(err, msg)
}

//export rbgo_reap
func rbgo_reap(id C.uint64_t, out *C.uint64_t, most C.uint32_t, count *C.uint32_t, msg *C.char) C.int {
	h, err := enter(id)
	if err != nil {
		return result(err, msg)
	}
	defer h.leave()
	n, err := h.Notifier()
	if err != nil {
		return result(err, msg)
	}
	*count = C.uint32_t(len(n.Reap(list[uint64](out, most)[:0])))
	return C.RB_OK
}

//export rbgo_stats
func rbgo_stats(at *C.char, timeout C.int64_t, out **C.char, msg *C.char) C.int {
	ctx, cancel := bounded(timeout)
	defer cancel()
	raw, err := admin.New(socket(at)).StatsJSON(ctx)
	if err != nil {
		return result(err, msg)
	}
	*out = C.CString(string(raw))
	return C.RB_OK
}
