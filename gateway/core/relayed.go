// SPDX-License-Identifier: Apache-2.0

package core

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/gateway/oip"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

// relayed is a relay's batch: one message whose rows are several requests. Each
// becomes a request of this ring, with a deadline of its own, and ends by
// itself. The requests of one message are committed together, so that they
// find into one batch again.
type relayed struct {
	requests []oip.RelayedRequest
	parts    []relayedPart // one for each request
	failed   []byte        // oip.FailedParameter
	sizes    []byte        // oip.SizesParameter
}

// relayedPart is one request of a relay's batch in this ring.
type relayedPart struct {
	request client.Request
	state   partState
	err     error
	// What was copied out of its slots because others were needed: each
	// output's rows, and their sizes.
	outputs [][]byte
	sizes   []byte
}

type partState uint8

const (
	partNone      partState = iota
	partClaimed             // its slots are filled
	partCommitted           // it is under way
	partHeld                // it has ended well, its outputs are in its slots
	partCopied              // its outputs are in outputs
	partFailed              // with err
)

// ReadRelayed reads which rows are a request of their own.
func (c *Call) ReadRelayed(text []byte) (err error) {
	if c.Relayed.requests, err = oip.ParseRequests(c.Relayed.requests[:0], text, c.Model.VariableInputs); err != nil {
		return BadRequest("%v", err)
	}
	return nil
}

func (c *Call) checkRelayed() error {
	if len(c.Relayed.requests) == 0 {
		return nil
	}
	rows := 0
	for i := range c.Relayed.requests {
		rows += c.Relayed.requests[i].Rows
	}
	if rows != c.rows {
		return fmt.Errorf("%w: %s has %d rows, the inputs have %d", status.ErrRows, oip.RequestsParameter, rows, c.rows)
	}
	for i := range c.Inputs {
		if c.Inputs[i].Region.Name != "" {
			return BadRequest("%s and shared memory are not for one request", oip.RequestsParameter)
		}
	}
	return nil
}

// rowBytes is the size of a row of input k with these sizes; -1 if they are
// larger than the model's.
func rowBytes(sig *tensor.Signature, k int, dims []uint32) int {
	at := 0
	for j := range k {
		at += len(sig.Inputs[j].Variable)
	}
	spec := &sig.Inputs[k]
	size, v := spec.DType.Size(), 0
	for d, most := range spec.Shape {
		if v < len(spec.Variable) && spec.Variable[v] == d {
			if int(dims[at+v]) > most {
				return -1
			}
			most = int(dims[at+v])
			v++
		}
		size *= most
	}
	return size
}

// bytesOf is the size of the k-th input in which each request lies in its own
// sizes.
func (r *relayed) bytesOf(sig *tensor.Signature, k int) (n int) {
	for i := range r.requests {
		q := &r.requests[i]
		size := rowBytes(sig, k, q.Dims[:])
		if size < 0 {
			return -1
		}
		n += q.Rows * size
	}
	return n
}

// relayedLane is the client for relays' requests: they are many and small.
func (k *Model) relayedLane() (*Lane, int) {
	_, window := k.lane(2)
	return &k.Relayed, window
}

// runRelayed runs the requests of a relay's batch, in steps:
//
//  1. claim, fill: request by request, in the order of the message
//  2. commit all of them together
//  3. wait for each; what went wrong is that request's own
//
// A window with less room than the message needs makes it go on in pieces.
func (c *Call) runRelayed(ctx context.Context, cl *client.Client) error {
	r := &c.Relayed
	r.release() // of an attempt before
	r.parts = append(r.parts[:0], make([]relayedPart, len(r.requests))...)
	now := time.Now()
	first, committed := 0, 0 // not collected yet, not committed yet
	for i := range r.requests {
		q, part := &r.requests[i], &r.parts[i]
		request, err := c.claimRelayed(ctx, cl, q, i, &first, &committed)
		if err != nil {
			if ctx.Err() != nil || errors.Is(err, status.ErrSignatureMismatch) || errors.Is(err, status.ErrClosed) {
				return err
			}
			part.fail(err)
			if err := c.skipRelayed(q); err != nil {
				return err
			}
			continue
		}
		part.request, part.state = request, partClaimed
		if q.Timeout > 0 {
			if err := request.SetDeadline(now.Add(q.Timeout)); err != nil {
				return err
			}
		}
		if err := c.fillRelayed(ctx, request, q); err != nil {
			return err
		}
	}
	if c.filled.IsZero() { // every one was refused
		c.filled = time.Now()
	}
	if err := c.FinishSources(); err != nil {
		return err
	}
	c.commitRelayed(ctx, committed, len(r.parts))
	for i := range r.parts {
		if err := c.waitRelayed(ctx, &r.parts[i]); err != nil {
			return err
		}
	}
	c.Ended = time.Now()
	return c.viewRelayed()
}

// claimRelayed takes slots for request i. It never waits for slots while it
// could get some back by finishing a request before it.
func (c *Call) claimRelayed(ctx context.Context, cl *client.Client, q *oip.RelayedRequest, i int, first,
	committed *int) (client.Request, error) {
	dims := c.dims[:0]
	for k := range c.Model.VariableInputs {
		dims = append(dims, int(q.Dims[k]))
	}
	c.dims = dims
	for {
		request, err := cl.TryClaim(q.Rows, dims...)
		if !errors.Is(err, status.ErrFull) {
			if errors.Is(err, status.ErrBrokerGone) {
				request, err = c.claim(ctx, cl, q.Rows)
			}
			return request, err
		}
		c.commitRelayed(ctx, *committed, i)
		if *committed = i; *first == i {
			return c.claim(ctx, cl, q.Rows)
		}
		part := &c.Relayed.parts[*first]
		*first++
		if err := c.waitRelayed(ctx, part); err != nil {
			return client.Request{}, err
		}
		if part.state == partHeld {
			if err := c.copyOut(part); err != nil {
				return client.Request{}, err
			}
		}
	}
}

// fillRelayed writes one request's inputs.
func (c *Call) fillRelayed(ctx context.Context, r client.Request, q *oip.RelayedRequest) error {
	c.setShapes(q)
	return c.send(ctx, r, q.Rows)
}

// setShapes makes the inputs' shapes those of one request.
func (c *Call) setShapes(q *oip.RelayedRequest) {
	if c.Model.VariableInputs == 0 {
		return
	}
	at := 0
	for k := range c.Model.Sig.Inputs {
		for i := range c.Inputs {
			if in := &c.Inputs[i]; in.index == k {
				for v, d := range c.Model.Sig.Inputs[k].Variable {
					in.Shape[d+1] = int(q.Dims[at+v])
				}
			}
		}
		at += len(c.Model.Sig.Inputs[k].Variable)
	}
}

// skipRelayed passes over the inputs of a request that got no slots.
func (c *Call) skipRelayed(q *oip.RelayedRequest) error {
	var scratch [4 << 10]byte
	for i := range c.Inputs {
		in := &c.Inputs[i]
		for left := q.Rows * rowBytes(&c.Model.Sig, in.index, q.Dims[:]); left > 0; {
			n := min(left, len(scratch))
			if err := in.Src.ReadFull(scratch[:n]); err != nil {
				return err
			}
			left -= n
		}
	}
	return nil
}

// commitRelayed hands parts[from:to] to the broker, which wakes once.
func (c *Call) commitRelayed(ctx context.Context, from, to int) {
	list := make([]client.Request, 0, to-from)
	for i := from; i < to; i++ {
		if p := &c.Relayed.parts[i]; p.state == partClaimed {
			list = append(list, p.request)
			p.state = partCommitted
		}
	}
	if err := client.CommitAll(ctx, list); err != nil {
		// Some of them were claimed before the broker was restarted.
		for i := from; i < to; i++ {
			if p := &c.Relayed.parts[i]; p.state == partCommitted {
				p.fail(fmt.Errorf("%w: %w", status.ErrBrokerGone, err))
			}
		}
	}
}

// waitRelayed waits for one request. Its error is the call's: the others are
// the request's own.
func (c *Call) waitRelayed(ctx context.Context, p *relayedPart) error {
	if p.state != partCommitted {
		return nil
	}
	err := p.request.Wait(ctx)
	if err == nil {
		p.state = partHeld
		c.addTiming(p.request)
		return nil
	}
	if ctx.Err() != nil { // the relay has hung up, or has no time left
		return err
	}
	p.fail(err)
	return nil
}

func (p *relayedPart) fail(err error) {
	_ = p.request.Release()
	p.request, p.state, p.err = client.Request{}, partFailed, err
}

// copyOut moves a request's outputs into the gateway's own memory, so that its
// slots are free.
func (c *Call) copyOut(p *relayedPart) error {
	for i := range c.Outputs {
		rows, sizes, err := c.rowsOf(p.request, &c.Outputs[i], nil)
		if err != nil {
			return err
		}
		n := 0
		for _, row := range rows {
			n += len(row)
		}
		if err := c.Take(n); err != nil {
			return err
		}
		all := make([]byte, 0, n)
		for _, row := range rows {
			all = append(all, row...)
		}
		p.outputs = append(p.outputs, all)
		if i == 0 {
			p.sizes = sizes
		}
	}
	err := p.request.Release()
	p.request, p.state = client.Request{}, partCopied
	return err
}

// rowsOf is an output of one request in place, in pieces, and the sizes of all
// variable outputs of its rows.
func (c *Call) rowsOf(r client.Request, o *Output, pieces [][]byte) ([][]byte, []byte, error) {
	spec := &c.Model.Sig.Outputs[o.index]
	if len(spec.Variable) == 0 {
		var one Output
		one.index = o.index
		if err := one.view(&c.Model.Sig, r); err != nil {
			return nil, nil, err
		}
		pieces = append(pieces, one.Parts...)
	} else {
		for row := range r.Rows() {
			t, err := r.OutputRow(spec.Name, row)
			if err != nil {
				return nil, nil, err
			}
			pieces = append(pieces, t.Data[:t.RowBytes()])
		}
	}
	sizes, err := c.sizesOf(r)
	return pieces, sizes, err
}

// sizesOf writes the sizes of the variable outputs of a request's rows.
func (c *Call) sizesOf(r client.Request) (text []byte, err error) {
	outputs := c.Model.Sig.Outputs
	if tensor.VariableDims(outputs) == 0 {
		return nil, nil
	}
	for row := range r.Rows() {
		var dims []uint32
		for k := range outputs {
			t, err := r.OutputRow(outputs[k].Name, row)
			if err != nil {
				return nil, err
			}
			for _, v := range outputs[k].Variable {
				dims = append(dims, uint32(t.Shape[v+1]))
			}
		}
		text = oip.AppendSizes(text, false, row == 0, dims)
	}
	return text, nil
}

// viewRelayed makes the outputs of all requests readable, and tells which have
// none.
func (c *Call) viewRelayed() error {
	r := &c.Relayed
	for i := range c.Outputs {
		o := &c.Outputs[i]
		spec := &c.Model.Sig.Outputs[o.index]
		o.DType, o.Shape, o.Parts, o.Size = spec.DType, append(append(o.Shape[:0], c.rows), spec.Shape...), o.Parts[:0], 0
		for k := range r.parts {
			p := &r.parts[k]
			var sizes []byte
			switch p.state {
			case partHeld:
				var err error
				if o.Parts, sizes, err = c.rowsOf(p.request, o, o.Parts); err != nil {
					return err
				}
			case partCopied:
				o.Parts, sizes = append(o.Parts, p.outputs[i]), p.sizes
			}
			if i == 0 && len(sizes) > 0 {
				if len(r.sizes) > 0 {
					r.sizes = append(r.sizes, ';')
				}
				r.sizes = append(r.sizes, sizes...)
			}
		}
		for _, part := range o.Parts {
			o.Size += len(part)
		}
	}
	for k := range r.parts {
		if p := &r.parts[k]; p.state == partFailed {
			r.failed = oip.AppendFailed(r.failed, k, nameOfEnd(p.err), TextOf(p.err))
		}
	}
	return nil
}

// nameOfEnd is the status that a relay hears of.
func nameOfEnd(err error) string {
	var code status.Code
	switch {
	case errors.As(err, &code):
		return code.Name()
	case errors.Is(err, context.DeadlineExceeded):
		return status.ErrExpired.Name()
	}
	return status.ErrFailed.Name()
}

// AppendParameters writes what the relay is told, if anything.
func (r *relayed) AppendParameters(b []byte) []byte {
	if len(r.failed) > 0 {
		b = oip.AppendText(b, oip.FailedParameter, r.failed)
	}
	if len(r.sizes) > 0 {
		b = oip.AppendText(b, oip.SizesParameter, r.sizes)
	}
	return b
}

// release gives the slots back.
func (r *relayed) release() {
	for i := range r.parts {
		if p := &r.parts[i]; p.state != partNone && p.state != partCopied && p.state != partFailed {
			_ = p.request.Release()
			p.state = partNone
		}
	}
}

// reset forgets everything but the memory.
func (r *relayed) reset() {
	clear(r.parts)
	*r = relayed{requests: r.requests[:0], parts: r.parts[:0], failed: r.failed[:0], sizes: r.sizes[:0]}
}
