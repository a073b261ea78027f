package main

// #include "internal.h"
import "C"

import (
	"errors"
	"fmt"
	"time"

	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

//export rbgo_claim
func rbgo_claim(id C.uint64_t, rows C.uint32_t, dims *C.uint32_t, ndims C.uint32_t, timeout C.int64_t, out *C.rb_request, msg *C.char) C.int {
	h, err := enter(id)
	if err != nil {
		return result(err, msg)
	}
	defer h.leave()
	var sizes [tensor.MaxVariableDims]int
	given := list[uint32](dims, ndims)
	if len(given) > len(sizes) {
		return result(status.ErrShape, msg)
	}
	for i, d := range given {
		sizes[i] = int(d)
	}
	r, err := h.claim(int(rows), sizes[:len(given)], timeout)
	if err != nil {
		return result(err, msg)
	}
	*out = C.rb_request{
		id: C.uint64_t(r.ID()), rows: rows, slot: C.uint32_t(r.Slot()), attachment: C.uint32_t(r.Attachment()),
		base: (*C.uint8_t)(r.Segment().AddressOf(0)),
	}
	return C.RB_OK
}

// claim tries first: only a full window, or a broker that is being restarted,
// costs a timer.
func (h *clientHandle) claim(rows int, dims []int, timeout C.int64_t) (client.Request, error) {
	r, err := h.TryClaim(rows, dims...)
	if err == nil || timeout == 0 || !errors.Is(err, status.ErrFull) && !errors.Is(err, status.ErrBrokerGone) {
		return r, err
	}
	ctx, cancel := bounded(timeout)
	defer cancel()
	return h.Claim(ctx, rows, dims...)
}

//export rbgo_view
func rbgo_view(id, req C.uint64_t, side C.int, k C.uint32_t, out *C.rb_view, msg *C.char) C.int {
	h, err := enter(id)
	if err != nil {
		return result(err, msg)
	}
	defer h.leave()
	p, _, err := plane(h.layout, side, k)
	if err != nil {
		return result(err, msg)
	}
	var t tensor.Tensor
	if r := h.RequestByID(uint64(req)); side == C.RB_INPUT {
		t, err = r.Input(p.Spec.Name)
	} else {
		t, err = r.Output(p.Spec.Name)
	}
	if err == nil {
		fillView(out, t)
	}
	return result(err, msg)
}

//export rbgo_output_row
func rbgo_output_row(id, req C.uint64_t, k, row C.uint32_t, out *C.rb_view, msg *C.char) C.int {
	h, err := enter(id)
	if err != nil {
		return result(err, msg)
	}
	defer h.leave()
	p, _, err := plane(h.layout, C.RB_OUTPUT, k)
	if err != nil {
		return result(err, msg)
	}
	t, err := h.RequestByID(uint64(req)).OutputRow(p.Spec.Name, int(row))
	if err == nil {
		fillView(out, t)
	}
	return result(err, msg)
}

//export rbgo_set_priority
func rbgo_set_priority(id, req C.uint64_t, level C.uint32_t, msg *C.char) C.int {
	return with(id, req, msg, func(r client.Request) error { return r.SetPriority(int(level)) })
}

//export rbgo_commit
func rbgo_commit(id, req C.uint64_t, timeout C.int64_t, flags C.uint32_t, msg *C.char) C.int {
	return with(id, req, msg, func(r client.Request) error { return commit(r, timeout, flags) })
}

func commit(r client.Request, timeout C.int64_t, flags C.uint32_t) error {
	if err := known(flags, C.RB_NOTIFY); err != nil {
		return err
	}
	if flags&C.RB_NOTIFY != 0 {
		if err := r.Notify(); err != nil {
			return err
		}
	}
	return r.CommitUntil(deadline(timeout))
}

// known refuses flags that the function does not have.
func known(flags, all C.uint32_t) error {
	if flags&^all != 0 {
		return fmt.Errorf("%w: flags %#x", status.ErrInvalid, flags&^all)
	}
	return nil
}

// deadline is a request's timeout as a point on shm.Now's clock.
func deadline(timeout C.int64_t) int64 {
	if timeout <= 0 {
		return 0
	}
	return shm.Now() + int64(duration(timeout))
}

//export rbgo_commit_all
func rbgo_commit_all(id C.uint64_t, ids *C.uint64_t, count C.uint32_t, timeout C.int64_t, flags C.uint32_t, msg *C.char) C.int {
	h, err := enter(id)
	if err != nil {
		return result(err, msg)
	}
	defer h.leave()
	var few [64]client.Request
	requests := few[:0]
	for _, id := range list[uint64](ids, count) {
		requests = append(requests, h.RequestByID(id))
	}
	return result(commitAll(requests, timeout, flags), msg)
}

func commitAll(requests []client.Request, timeout C.int64_t, flags C.uint32_t) error {
	if err := known(flags, C.RB_NOTIFY); err != nil {
		return err
	}
	one := true // attachment, as long as the broker was not restarted in between
	for _, r := range requests {
		if r.Rows() == 0 { // first: then none is committed
			return status.ErrReleased
		}
		if flags&C.RB_NOTIFY != 0 {
			if err := r.Notify(); err != nil {
				return err
			}
		}
		one = one && r.Attachment() == requests[0].Attachment()
	}
	if one {
		return client.CommitAllUntil(requests, deadline(timeout))
	}
	for _, r := range requests {
		if err := r.CommitUntil(deadline(timeout)); err != nil {
			return err
		}
	}
	return nil
}

//export rbgo_wait
func rbgo_wait(id, req C.uint64_t, timeout C.int64_t, msg *C.char) C.int {
	return with(id, req, msg, func(r client.Request) error { return r.WaitFor(duration(timeout)) })
}

// duration is a timeout of the C side; for ever is a hundred years, and so is
// what is longer: it can be added to a point in time.
func duration(timeout C.int64_t) time.Duration {
	const forEver = 100 * 365 * 24 * time.Hour
	if timeout < 0 || time.Duration(timeout) > forEver {
		return forEver
	}
	return time.Duration(timeout)
}

//export rbgo_poll
func rbgo_poll(id, req C.uint64_t, msg *C.char) C.int { return with(id, req, msg, client.Request.Poll) }

//export rbgo_cancel
func rbgo_cancel(id, req C.uint64_t, msg *C.char) C.int {
	return with(id, req, msg, client.Request.Cancel)
}

//export rbgo_release
func rbgo_release(id, req C.uint64_t, msg *C.char) C.int {
	return with(id, req, msg, client.Request.Release)
}

//export rbgo_request_map
func rbgo_request_map(id, req C.uint64_t, out *C.rb_map, msg *C.char) C.int {
	return with(id, req, msg, func(r client.Request) error {
		m, err := r.Map()
		if err == nil {
			fillMap(out, m)
		}
		return err
	})
}

//export rbgo_request_timing
func rbgo_request_timing(id, req C.uint64_t, out *C.rb_timing, msg *C.char) C.int {
	return with(id, req, msg, func(r client.Request) error {
		t, err := r.Timing()
		if err == nil {
			*out = C.rb_timing{
				claim: C.int64_t(t.Claim), write: C.int64_t(t.Write), queue: C.int64_t(t.Queue),
				dispatch: C.int64_t(t.Dispatch), compute: C.int64_t(t.Compute), wake: C.int64_t(t.Wake),
			}
		}
		return err
	})
}

// with does one step of a request's life.
func with(id, req C.uint64_t, msg *C.char, step func(client.Request) error) C.int {
	h, err := enter(id)
	if err != nil {
		return result(err, msg)
	}
	defer h.leave()
	return result(step(h.RequestByID(uint64(req))), msg)
}
