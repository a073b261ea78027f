// SPDX-License-Identifier: Apache-2.0

package core

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/internal/pad"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

// Run runs a checked call. Its outputs can be read until Done. When ctx ends, the
// request ends in the ring as well.
func (c *Call) Run(ctx context.Context) error {
	if c.timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, c.timeout)
		defer cancel()
	}
	err := c.runOn(ctx)
	gone := errors.Is(err, status.ErrSignatureMismatch) || errors.Is(err, status.ErrClosed) || errors.Is(err, status.ErrUnknownModel)
	if !gone || !c.filled.IsZero() { // the sources can be read once only
		return err
	}
	if err := c.follow(ctx); err != nil {
		return err
	}
	return c.runOn(ctx)
}

// runOn runs the call on its present model.
func (c *Call) runOn(ctx context.Context) error {
	defer c.Model.load.begin(c.rows)()
	c.weights = 0 // of an earlier attempt
	return c.runner.run(ctx, c)
}

// attach enters a lane's client, and leaves that of an earlier attempt.
func (c *Call) attach(ctx context.Context, l *lane, window int) (*attachment, error) {
	a, err := l.client(ctx, c.Model, window)
	if err == nil {
		c.leaveClient()
		c.on = a
	}
	return a, err
}

// plain runs a call as one request, or as several that together have its rows.
type plain struct{ request client.Request } // its slots hold the outputs

func (*plain) prepare(*Call) error { return nil }

func (*plain) inputBytes(_ *Call, _ *Input, shaped int) int { return shaped }

func (p *plain) release() { _ = p.request.Release() } // or there is none

func (p *plain) run(ctx context.Context, c *Call) error {
	p.release() // of an earlier attempt
	l, window := c.Model.lane(c.rows)
	e, err := c.enter(ctx, l, window)
	if err != nil {
		return err
	}
	m := e.a.Model()
	most := min(m.MaxBatchSize, m.Window, c.Model.info.Load().settings.MaxBatchSize)
	if err := c.takeShare(ctx, e.lane, e.share(shareOf(m.Window, most))); err != nil {
		return err
	}
	if c.rows <= most {
		err = c.runWhole(ctx, e.a.Client)
	} else {
		err = c.runSplit(ctx, e.a.Client, most)
	}
	e.lane.forgetAfter(err, e.a)
	c.noteFailure(e, err)
	return err
}

// entry is a call's use of a lane's client.
type entry struct {
	*lane
	a              *attachment
	window         int
	suspect, alone bool
}

// share is the caller's slots of the window: usual, or all of it.
func (e *entry) share(usual int) int {
	if e.alone {
		return e.a.Model().Window
	}
	return usual
}

// enter enters the client of lane l, or that of a suspect.
func (c *Call) enter(ctx context.Context, l *lane, window int) (e entry, err error) {
	e = entry{lane: l, window: window}
	if lane, its, alone := c.Model.suspectLane(c.Caller.Use); lane != nil {
		e = entry{lane: lane, window: its, suspect: true, alone: alone}
	}
	e.a, err = c.attach(ctx, e.lane, e.window)
	if e.suspect && (errors.Is(err, status.ErrRingFull) || errors.Is(err, status.ErrQuota)) {
		c.Model.suspects.noteFull() // it stays with the others
		return c.enter(ctx, l, window)
	}
	return e, err
}

// noteFailure counts a failure in a worker against the caller. The broker has charged it to
// the client, so that of others is replaced.
func (c *Call) noteFailure(e entry, err error) {
	if failedInWorker(err) && c.Caller.Use.failed() && !e.suspect {
		e.change.Do(func() { go e.replace(c.Model, e.a, e.window) })
	}
}

// follow looks up a model that has gone: after a restart of the broker it is back as
// another Model. A new signature needs another Check, so the call fails.
func (c *Call) follow(ctx context.Context) error {
	models := c.Model.G.Models
	models.refresh(ctx)
	k := (*models.byName.Load())[c.Model.Name]
	switch {
	case k == nil:
		if err := models.awaited(c.Model.Name); err != nil {
			return err
		}
		return fmt.Errorf("%w: model %q is gone", status.ErrUnknownModel, c.Model.Name)
	case !k.Sig.Equal(&c.Model.Sig):
		return fmt.Errorf("%w: model %q has changed, ask for its metadata again", status.ErrSignatureMismatch, c.Model.Name)
	}
	c.Model = k
	return nil
}

// claim takes slots, and waits for them until ctx or ClaimWait ends.
func (c *Call) claim(ctx context.Context, cl *client.Client, rows int) (client.Request, error) {
	r, err := cl.TryClaim(rows, c.dims...)
	if err == nil || !errors.Is(err, status.ErrFull) && !errors.Is(err, status.ErrBrokerGone) {
		return r, err
	}
	if c.OnWait != nil {
		defer c.OnWait()
	}
	wait, cancel := context.WithTimeout(ctx, c.Model.G.Cfg.ClaimWait)
	defer cancel()
	return cl.Claim(wait, rows, c.dims...)
}

// runWhole runs a request of at most a batch. Its outputs stay in the slots.
func (c *Call) runWhole(ctx context.Context, cl *client.Client) error {
	r, err := c.claim(ctx, cl, c.rows)
	if err != nil {
		return err
	}
	c.plain.request = r
	if err := c.execute(ctx, r); err != nil {
		return err
	}
	return c.view(r)
}

// view makes the outputs of r readable, or writes them into the caller's shared memory.
func (c *Call) view(r client.Request) error {
	for i := range c.Outputs {
		if err := c.Outputs[i].view(&c.Model.Sig, r); err != nil {
			return err
		}
	}
	if len(c.regions) > 0 {
		return c.writeRegions()
	}
	return nil
}

// execute fills the slots of a request for all rows, and waits for its end.
func (c *Call) execute(ctx context.Context, r client.Request) error {
	if err := c.send(ctx, r, c.rows); err != nil {
		return err
	}
	if err := c.finishSources(); err != nil {
		return err
	}
	c.Committed = true
	parts := c.wantsParts(r)
	if err := r.Commit(ctx); err != nil {
		return err
	}
	if parts {
		if err := c.passParts(ctx, r); err != nil {
			return err
		}
	}
	if err := r.Wait(ctx); err != nil {
		return err
	}
	c.Ended = time.Now()
	c.addTiming(r)
	c.noteWeights(r)
	return nil
}

// runSplit divides a request of more rows than a batch into parts, and joins their
// outputs in the gateway's memory.
//
// Before it waits for slots, it finishes its own parts, so that two split requests
// never wait for one another.
func (c *Call) runSplit(ctx context.Context, cl *client.Client, most int) (err error) {
	if len(c.Inputs) > 1 {
		if err := c.bufferBodies(); err != nil { // a body has one input after the other
			return err
		}
	}
	var parts []client.Request
	held := 0 // rows of parts
	defer func() {
		for _, r := range parts {
			_ = r.Release()
		}
	}()
	finish := func() error {
		if c.OnWait != nil {
			defer c.OnWait()
		}
		r := parts[0]
		if err := r.Wait(ctx); err != nil {
			return err
		}
		c.addTiming(r)
		c.noteWeights(r)
		for i := range c.Outputs {
			if err := c.join(&c.Outputs[i], r); err != nil {
				return err
			}
		}
		parts, held = parts[1:], held-r.Rows()
		return r.Release()
	}
	for from := 0; from < c.rows || len(parts) > 0; {
		n := min(most, c.rows-from)
		r, err := client.Request{}, error(status.ErrFull)
		if from < c.rows && (held == 0 || held+n <= c.share.of.most) {
			r, err = cl.TryClaim(n, c.dims...)
		}
		if errors.Is(err, status.ErrFull) && len(parts) > 0 {
			if err := finish(); err != nil {
				return err
			}
			continue
		}
		if err != nil {
			if r, err = c.claim(ctx, cl, n); err != nil {
				return err
			}
		}
		parts, held = append(parts, r), held+n
		if err := c.send(ctx, r, n); err != nil {
			return err
		}
		if from += n; from == c.rows {
			if err := c.finishSources(); err != nil {
				return err
			}
		}
		c.Committed = true
		if err := r.Commit(ctx); err != nil {
			return err
		}
	}
	c.Ended = time.Now()
	if len(c.regions) > 0 {
		return c.writeRegions()
	}
	return nil
}

// send fills the slots of r from the sources, in the body's order.
func (c *Call) send(ctx context.Context, r client.Request, rows int) error {
	if c.level >= 0 {
		if err := r.SetPriority(c.level); err != nil {
			return err
		}
	}
	for i := range c.Inputs {
		in := &c.Inputs[i]
		if err := c.fill(r, in, rows); err != nil {
			if _, ok := in.Src.(JSONSource); ok { // it does not know the name
				err = fmt.Errorf("input %q: %w", in.Name, err)
			}
			return err
		}
	}
	if c.filled = time.Now(); ctx.Err() != nil { // a slow body may have outlived its deadline
		return context.Cause(ctx)
	}
	return nil
}

func (c *Call) fill(r client.Request, in *Input, rows int) error {
	spec := &c.Model.Sig.Inputs[in.index]
	if len(spec.Variable) == 0 {
		p, err := r.InputBytes(in.index)
		if err != nil {
			return err
		}
		if len(p) == rows*spec.RowBytes() { // no gaps between rows
			return in.Src.ReadFull(p)
		}
	}
	view, err := r.Input(in.Name)
	if err != nil {
		return err
	}
	actual := in.Shape[1:]
	size := spec.DType.Size()
	for _, d := range actual {
		size *= d
	}
	if slices.Equal(actual, view.Shape[1:]) {
		if view.Contiguous() {
			return in.Src.ReadFull(view.Data[:rows*size])
		}
		for i := range rows {
			if err := in.Src.ReadFull(view.Row(i).Data[:size]); err != nil {
				return err
			}
		}
		return nil
	}
	row := make([]byte, size) // the slot's bucket is larger
	for i := range rows {
		if err := in.Src.ReadFull(row); err != nil {
			return err
		}
		to := view.Row(i)
		pad.Corner(to.Data, row, to.Shape[1:], actual, spec.DType.Size())
	}
	return nil
}

// finishSources checks that sources of unknown size are at their end.
func (c *Call) finishSources() error {
	for i := range c.Inputs {
		if s, ok := c.Inputs[i].Src.(interface{ Finish() error }); ok {
			if err := s.Finish(); err != nil {
				return fmt.Errorf("input %q: %w", c.Inputs[i].Name, err)
			}
		}
	}
	if c.OnFilled != nil {
		c.OnFilled()
	}
	return nil
}

func (c *Call) bufferBodies() error {
	var body *BodySource
	for i := range c.Inputs {
		in := &c.Inputs[i]
		s, ok := in.Src.(*BodySource)
		if !ok {
			continue
		}
		first := min(len(s.Ahead), in.Size)
		all, err := c.ReadCounted(s, slices.Clone(s.Ahead[:first]), in.Size)
		if err != nil {
			return err
		}
		s.Ahead = s.Ahead[first:]
		body, in.Src = s, (*BytesSource)(&all) // all inputs have the same body
	}
	if body == nil {
		return nil
	}
	return body.Finish()
}

// view makes an output of r readable in the slots.
func (o *Output) view(sig *tensor.Signature, r client.Request) error {
	spec := &sig.Outputs[o.index]
	o.DType = spec.DType
	if len(spec.Variable) == 0 {
		p, err := r.OutputBytes(o.index)
		if err != nil {
			return err
		}
		if len(p) == r.Rows()*spec.RowBytes() {
			o.Shape = append(append(o.Shape[:0], r.Rows()), spec.Shape...)
			o.Parts, o.Size = append(o.Parts[:0], p), len(p)
			return nil
		}
	}
	t, err := r.Output(spec.Name)
	if err != nil {
		return err
	}
	o.Shape, o.Size = append(o.Shape[:0], t.Shape...), t.Rows()*t.RowBytes()
	o.Parts = o.Parts[:0]
	if t.Contiguous() {
		o.Parts = append(o.Parts, t.Data[:o.Size])
		return nil
	}
	for i := range t.Rows() {
		o.Parts = append(o.Parts, t.Row(i).Data[:t.RowBytes()])
	}
	return nil
}

func (c *Call) join(o *Output, r client.Request) error {
	var part Output
	part.index = o.index
	if err := part.view(&c.Model.Sig, r); err != nil {
		return err
	}
	if o.DType == 0 { // the first part
		spec := &c.Model.Sig.Outputs[o.index]
		most := c.rows * spec.RowBytes()
		if err := c.Take(most); err != nil {
			return err
		}
		o.DType, o.Shape, o.Size = part.DType, append(o.Shape[:0], part.Shape...), 0
		o.Shape[0] = 0
		o.Parts = append(o.Parts[:0], make([]byte, 0, c.rows*part.Size/r.Rows()))
	}
	if !slices.Equal(o.Shape[1:], part.Shape[1:]) {
		return fmt.Errorf("%w: output %q has rows of shape %v and of shape %v: ask for fewer rows at once", status.ErrShape, o.Name,
			o.Shape[1:], part.Shape[1:])
	}
	for _, p := range part.Parts {
		o.Parts[0] = append(o.Parts[0], p...)
	}
	o.Shape[0] += part.Shape[0]
	o.Size += part.Size
	return nil
}

func (c *Call) addTiming(r client.Request) {
	if t, err := r.Timing(); err == nil {
		c.queue += t.Claim + t.Queue + t.Dispatch
		c.compute += t.Compute
	}
}

func (c *Call) leaveClient() {
	if c.on != nil {
		c.on.leave()
		c.on = nil
	}
}
