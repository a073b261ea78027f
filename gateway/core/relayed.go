// SPDX-License-Identifier: Apache-2.0

package core

import (
	"bytes"
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
// becomes a request of this ring with its own deadline and its own end. They are
// committed together, so that they form one batch again.
type relayed struct {
	requests []oip.RelayedRequest
	parts    []relayedPart // one per request
}

type relayedPart struct {
	request client.Request
	state   partState
	err     error
	// Copies of the outputs and their sizes, made when other requests need the slots.
	outputs [][]byte
	sizes   []byte
}

type partState uint8

const (
	partNone      partState = iota
	partClaimed             // has slots
	partCommitted           // in flight
	partHeld                // ended well, outputs in the slots
	partCopied              // ended well, outputs copied
	partFailed              // with err
)

// ReadRelayed reads RequestsParameter.
func (c *Call) ReadRelayed(text []byte) (err error) {
	if c.relayed.requests, err = oip.ParseRequests(c.relayed.requests[:0], text, c.Model.variableInputs); err != nil {
		return BadRequest("%v", err)
	}
	c.runner = &c.relayed
	return nil
}

func (r *relayed) prepare(c *Call) error {
	if c.Step.ID != (SequenceID{}) {
		return BadRequest("%s and sequence_id are not for one request", oip.RequestsParameter)
	}
	rows := 0
	for i := range r.requests {
		rows += r.requests[i].Rows
	}
	if rows != c.rows {
		return fmt.Errorf("%w: %s has %d rows, the inputs have %d", status.ErrRows, oip.RequestsParameter, rows, c.rows)
	}
	if len(c.regions) > 0 {
		return BadRequest("%s and shared memory are not for one request", oip.RequestsParameter)
	}
	c.level = min(c.level, c.levels()-1) // the relay's host may have more
	return nil
}

// rowBytes returns the size of a row of input k with these variable sizes; -1 if
// they are larger than the model's.
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

// inputBytes counts each request in its own sizes.
func (r *relayed) inputBytes(c *Call, in *Input, shaped int) (n int) {
	if len(c.Model.Sig.Inputs[in.index].Variable) == 0 {
		return shaped
	}
	for i := range r.requests {
		q := &r.requests[i]
		size := rowBytes(&c.Model.Sig, in.index, q.Dims[:])
		if size < 0 {
			return -1
		}
		n += q.Rows * size
	}
	return n
}

// run runs the call in the lane of relays, of which a caller may have half.
func (r *relayed) run(ctx context.Context, c *Call) error {
	_, window := c.Model.lane(2)
	e, err := c.enter(ctx, &c.Model.relayed, window)
	if err != nil {
		return err
	}
	if err := c.takeShare(ctx, e.lane, e.share(max(1, e.a.Model().Window/2))); err != nil {
		return err
	}
	err = c.runRelayed(ctx, e.a.Client)
	e.lane.forgetAfter(err, e.a)
	for i := range r.parts {
		c.noteFailure(e, r.parts[i].err)
	}
	return err
}

// runRelayed runs the requests of a relay's batch, in steps:
//
//  1. claim and fill, request by request, in the order of the message
//  2. commit all requests together
//  3. wait for each; each has its own error
//
// If the window has too few slots, the message goes in pieces.
func (c *Call) runRelayed(ctx context.Context, cl *client.Client) error {
	r := &c.relayed
	r.release() // of an earlier attempt
	r.parts = append(r.parts[:0], make([]relayedPart, len(r.requests))...)
	now := time.Now()
	first, committed := 0, 0 // the first requests not waited for, and not committed
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
		c.setShapes(q)
		if err := c.send(ctx, request, q.Rows); err != nil {
			return err
		}
	}
	if c.filled.IsZero() { // every request was refused
		c.filled = time.Now()
	}
	if err := c.finishSources(); err != nil {
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

// claimRelayed takes slots for request i. Before it waits for slots, it finishes
// the earlier requests, which gives theirs back.
func (c *Call) claimRelayed(ctx context.Context, cl *client.Client, q *oip.RelayedRequest, i int, first,
	committed *int) (client.Request, error) {
	dims := c.dims[:0]
	for k := range c.Model.variableInputs {
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
		part := &c.relayed.parts[*first]
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

func (c *Call) setShapes(q *oip.RelayedRequest) {
	if c.Model.variableInputs == 0 {
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

func (c *Call) skipRelayed(q *oip.RelayedRequest) error {
	var scratch [4 << 10]byte
	for i := range c.Inputs {
		in := &c.Inputs[i]
		if spec := &c.Model.Sig.Inputs[in.index]; spec.DType == tensor.Str {
			if err := in.source(spec).ReadFull(make([]byte, q.Rows*spec.RowBytes())); err != nil {
				return err
			}
			continue
		}
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

// commitRelayed commits parts[from:to] together: the broker wakes once.
func (c *Call) commitRelayed(ctx context.Context, from, to int) {
	list := make([]client.Request, 0, to-from)
	for i := from; i < to; i++ {
		if p := &c.relayed.parts[i]; p.state == partClaimed {
			list = append(list, p.request)
			p.state, c.Committed = partCommitted, true
		}
	}
	if err := client.CommitAll(ctx, list); err != nil {
		// Some were claimed before a restart of the broker.
		for i := from; i < to; i++ {
			if p := &c.relayed.parts[i]; p.state == partCommitted {
				p.fail(fmt.Errorf("%w: %w", status.ErrBrokerGone, err))
			}
		}
	}
}

// waitRelayed waits for a request. It returns errors of the call only.
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
	if ctx.Err() != nil { // of the relay
		return err
	}
	p.fail(err)
	return nil
}

func (p *relayedPart) fail(err error) {
	_ = p.request.Release()
	p.request, p.state, p.err = client.Request{}, partFailed, err
}

// copyOut copies a request's outputs, and gives its slots back.
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
		p.outputs = append(p.outputs, bytes.Join(rows, nil))
		if i == 0 {
			p.sizes = sizes
		}
	}
	err := p.request.Release()
	p.request, p.state = client.Request{}, partCopied
	return err
}

// rowsOf appends the pieces of a request's output, in the slots, and returns the
// sizes of all variable outputs.
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

// viewRelayed makes the outputs of all requests readable, and lists the failed ones.
func (c *Call) viewRelayed() error {
	r := &c.relayed
	var failed, sizes []byte
	for i := range c.Outputs {
		o := &c.Outputs[i]
		spec := &c.Model.Sig.Outputs[o.index]
		o.DType, o.Shape, o.Parts, o.Size = spec.DType, append(append(o.Shape[:0], c.rows), spec.Shape...), o.Parts[:0], 0
		for k := range r.parts {
			p := &r.parts[k]
			var its []byte
			switch p.state {
			case partHeld:
				var err error
				if o.Parts, its, err = c.rowsOf(p.request, o, o.Parts); err != nil {
					return err
				}
			case partCopied:
				o.Parts, its = append(o.Parts, p.outputs[i]), p.sizes
			}
			if i == 0 && len(its) > 0 {
				if len(sizes) > 0 {
					sizes = append(sizes, ';')
				}
				sizes = append(sizes, its...)
			}
		}
		for _, part := range o.Parts {
			o.Size += len(part)
		}
	}
	for k := range r.parts {
		if p := &r.parts[k]; p.state == partFailed {
			failed = oip.AppendFailed(failed, k, nameOfEnd(p.err), TextOf(p.err))
		}
	}
	if err := c.finishOutputs(); err != nil {
		return err
	}
	c.Parameters = c.Parameters[:0]
	if len(failed) > 0 {
		c.Parameters = oip.AppendText(c.Parameters, oip.FailedParameter, failed)
	}
	if len(sizes) > 0 {
		c.Parameters = oip.AppendText(c.Parameters, oip.SizesParameter, sizes)
	}
	return nil
}

// nameOfEnd returns the status of a request for the relay.
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

func (r *relayed) release() {
	for i := range r.parts {
		if p := &r.parts[i]; p.state != partNone && p.state != partCopied && p.state != partFailed {
			_ = p.request.Release()
			p.state = partNone
		}
	}
}

// emptied keeps the memory.
func (r *relayed) emptied() relayed {
	clear(r.parts)
	return relayed{requests: r.requests[:0], parts: r.parts[:0]}
}
