// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/internal/pad"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

// run does the inference of a checked call; after it the outputs can be read
// until release. When ctx ends, the request ends in the ring too.
func (c *call) run(ctx context.Context) error {
	if c.timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, c.timeout)
		defer cancel()
	}
	err := c.runOn(ctx)
	went := errors.Is(err, status.ErrSignatureMismatch) || errors.Is(err, status.ErrClosed) || errors.Is(err, status.ErrUnknownModel)
	if !went || !c.filled.IsZero() { // what was read from the sources cannot be sent again
		return err
	}
	if err := c.follow(ctx); err != nil {
		return err
	}
	return c.runOn(ctx)
}

// runOn does it on the call's model.
func (c *call) runOn(ctx context.Context) error {
	lane, window := c.model.lane(c.rows)
	if len(c.relayed.requests) > 0 {
		lane, window = c.model.relayedLane()
	}
	defer c.model.load.begin(c.rows)()
	cl, err := c.dial(ctx, lane, window)
	if err != nil {
		return err
	}
	m := cl.Model()
	most := min(m.MaxBatchSize, m.Window, c.model.info.Load().settings.MaxBatchSize)
	relayed := len(c.relayed.requests) > 0
	if !relayed { // relays have a window of their own, and messages of whole batches
		if err := c.takeShare(ctx, lane, shareOf(m.Window, most)); err != nil {
			return err
		}
	}
	if relayed {
		err = c.runRelayed(ctx, cl)
	} else if c.rows <= most {
		err = c.runWhole(ctx, cl)
	} else {
		err = c.runSplit(ctx, cl, most)
	}
	if errors.Is(err, status.ErrSignatureMismatch) || errors.Is(err, status.ErrClosed) {
		lane.forget(cl) // of a model that came back as another one it is of no use any more
	}
	return err
}

// follow finds what has the place of a model that went: it may have come back, as
// it does when its broker is restarted. Another signature is another model: the
// call was checked against the former one.
func (c *call) follow(ctx context.Context) error {
	models := c.model.g.models
	models.refresh(ctx)
	k := (*models.byName.Load())[c.model.name]
	switch {
	case k == nil:
		if err := models.awaited(c.model.name, ""); err != nil {
			return err
		}
		return fmt.Errorf("%w: model %q is gone", status.ErrUnknownModel, c.model.name)
	case !k.sig.Equal(&c.model.sig):
		return fmt.Errorf("%w: model %q has changed, ask for its metadata again", status.ErrSignatureMismatch, c.model.name)
	}
	c.model = k
	return nil
}

func (c *call) dial(ctx context.Context, lane *lane, window int) (*client.Client, error) {
	if cl := lane.live.Load(); cl != nil {
		return cl, nil
	}
	return lane.client(ctx, c.model, window)
}

// claim takes slots, waiting for them as long as the caller would.
func (c *call) claim(ctx context.Context, cl *client.Client, rows int) (client.Request, error) {
	r, err := cl.TryClaim(rows, c.dims...)
	if err == nil || !errors.Is(err, status.ErrFull) && !errors.Is(err, status.ErrBrokerGone) {
		return r, err
	}
	if c.onWait != nil { // the body's time begins again
		defer c.onWait()
	}
	wait, cancel := context.WithTimeout(ctx, c.model.g.cfg.ClaimWait)
	defer cancel()
	return cl.Claim(wait, rows, c.dims...)
}

// runWhole is a request of at most a batch: its outputs stay in the slots.
func (c *call) runWhole(ctx context.Context, cl *client.Client) error {
	r, err := c.claim(ctx, cl, c.rows)
	if err != nil {
		return err
	}
	c.request, c.claimed = r, true
	if err := c.send(ctx, r, c.rows); err != nil {
		return err
	}
	if err := c.finishSources(); err != nil {
		return err
	}
	if err := r.Commit(ctx); err != nil {
		return err
	}
	if err := r.Wait(ctx); err != nil {
		return err
	}
	c.ended = time.Now()
	c.addTiming(r)
	for i := range c.outputs {
		if err := c.outputs[i].view(&c.model.sig, r); err != nil {
			return err
		}
	}
	return nil
}

// runSplit cuts a request of more rows than a batch into several, and joins
// their outputs in memory of the gateway's own.
//
// It never waits for slots while it could get some back by finishing a part:
// two of these cannot wait for one another.
func (c *call) runSplit(ctx context.Context, cl *client.Client, most int) (err error) {
	if len(c.inputs) > 1 {
		if err := c.bufferBodies(); err != nil { // their bytes come one input after the other
			return err
		}
	}
	var parts []client.Request
	held := 0 // rows of these
	defer func() {
		for _, r := range parts {
			_ = r.Release()
		}
	}()
	finish := func() error {
		if c.onWait != nil {
			defer c.onWait()
		}
		r := parts[0]
		if err := r.Wait(ctx); err != nil {
			return err
		}
		c.addTiming(r)
		for i := range c.outputs {
			if err := c.join(&c.outputs[i], r); err != nil {
				return err
			}
		}
		parts, held = parts[1:], held-r.Rows()
		return r.Release()
	}
	for from := 0; from < c.rows || len(parts) > 0; {
		if from == c.rows {
			if err := finish(); err != nil {
				return err
			}
			continue
		}
		n := min(most, c.rows-from)
		if held > 0 && held+n > c.share.most {
			if err := finish(); err != nil {
				return err
			}
			continue
		}
		r, err := cl.TryClaim(n, c.dims...)
		switch {
		case err == nil:
		case errors.Is(err, status.ErrFull) && len(parts) > 0:
			if err := finish(); err != nil {
				return err
			}
			continue
		default:
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
		if err := r.Commit(ctx); err != nil {
			return err
		}
	}
	c.ended = time.Now()
	return nil
}

// send fills the slots of r from the sources, in the order of the body.
func (c *call) send(ctx context.Context, r client.Request, rows int) error {
	if c.level >= 0 {
		if err := r.SetPriority(c.level); err != nil {
			return err
		}
	}
	for i := range c.inputs {
		in := &c.inputs[i]
		if err := c.fill(r, in, rows); err != nil {
			if _, ok := in.src.(jsonSource); ok { // it does not know whose elements they are
				err = fmt.Errorf("input %q: %w", in.name, err)
			}
			return err
		}
	}
	if c.filled = time.Now(); ctx.Err() != nil { // a slow body may have outlived its deadline
		return context.Cause(ctx)
	}
	return nil
}

func (c *call) fill(r client.Request, in *input, rows int) error {
	spec := &c.model.sig.Inputs[in.index]
	if len(spec.Variable) == 0 {
		p, err := r.InputBytes(in.index)
		if err != nil {
			return err
		}
		if len(p) == rows*spec.RowBytes() { // no gaps between rows
			return in.src.ReadFull(p)
		}
	}
	view, err := r.Input(in.name)
	if err != nil {
		return err
	}
	actual := in.shape[1:]
	size := spec.DType.Size()
	for _, d := range actual {
		size *= d
	}
	if slices.Equal(actual, view.Shape[1:]) {
		if view.Contiguous() {
			return in.src.ReadFull(view.Data[:rows*size])
		}
		for i := range rows {
			if err := in.src.ReadFull(view.Row(i).Data[:size]); err != nil {
				return err
			}
		}
		return nil
	}
	row := make([]byte, size) // smaller than its bucket
	for i := range rows {
		if err := in.src.ReadFull(row); err != nil {
			return err
		}
		to := view.Row(i)
		pad.Corner(to.Data, row, to.Shape[1:], actual, spec.DType.Size())
	}
	return nil
}

// finishSources asks those sources that count by themselves whether that was all.
func (c *call) finishSources() error {
	for i := range c.inputs {
		if s, ok := c.inputs[i].src.(interface{ finish() error }); ok {
			if err := s.finish(); err != nil {
				return fmt.Errorf("input %q: %w", c.inputs[i].name, err)
			}
		}
	}
	if c.onFilled != nil {
		c.onFilled()
	}
	return nil
}

// bufferBodies reads what is still in an HTTP body into memory.
func (c *call) bufferBodies() error {
	var body *bodySource
	for i := range c.inputs {
		in := &c.inputs[i]
		s, ok := in.src.(*bodySource)
		if !ok {
			continue
		}
		first := min(len(s.ahead), in.size)
		all, err := c.readCounted(s, slices.Clone(s.ahead[:first]), in.size)
		if err != nil {
			return err
		}
		s.ahead = s.ahead[first:]
		body, in.src = s, (*bytesSource)(&all) // all inputs have the same one
	}
	if body == nil {
		return nil
	}
	return body.finish()
}

// readCounted reads size bytes behind b, or with -1 all that there are. Bytes are
// counted, and memory grows, as they come: what was only announced costs nothing.
func (c *call) readCounted(r io.Reader, b []byte, size int) ([]byte, error) {
	for size < 0 || len(b) < size {
		if len(b) == cap(b) {
			more := max(smallBuffer, cap(b))
			if size >= 0 {
				more = min(more, max(size-len(b), 4<<10))
			}
			if cap(b)+more > smallBuffer {
				if err := c.take(more); err != nil {
					return b, err
				}
			}
			b = slices.Grow(b, more)[: len(b) : len(b)+more]
		}
		to := b[len(b):cap(b)]
		if size >= 0 {
			to = to[:min(len(to), size-len(b))]
		}
		n, err := r.Read(to)
		b = b[:len(b)+n]
		if errors.Is(err, io.EOF) && (size < 0 || len(b) == size) {
			return b, nil
		}
		if err != nil {
			return b, bodyError(err)
		}
	}
	return b, nil
}

// take counts bytes of the gateway's own memory as the caller's, until release.
func (c *call) take(n int) error {
	if err := c.model.g.limits.takeBytes(c.caller.use, n, c.taken); err != nil {
		return err
	}
	c.taken += n
	return nil
}

// view makes an output of r's rows readable in place.
func (o *output) view(sig *tensor.Signature, r client.Request) error {
	spec := &sig.Outputs[o.index]
	o.dtype = spec.DType
	if len(spec.Variable) == 0 {
		p, err := r.OutputBytes(o.index)
		if err != nil {
			return err
		}
		if len(p) == r.Rows()*spec.RowBytes() {
			o.shape = append(append(o.shape[:0], r.Rows()), spec.Shape...)
			o.parts, o.size = append(o.parts[:0], p), len(p)
			return nil
		}
	}
	t, err := r.Output(spec.Name)
	if err != nil {
		return err
	}
	o.shape, o.size = append(o.shape[:0], t.Shape...), t.Rows()*t.RowBytes()
	o.parts = o.parts[:0]
	if t.Contiguous() {
		o.parts = append(o.parts, t.Data[:o.size])
		return nil
	}
	for i := range t.Rows() {
		o.parts = append(o.parts, t.Row(i).Data[:t.RowBytes()])
	}
	return nil
}

// join appends an output of a part of the call.
func (c *call) join(o *output, r client.Request) error {
	var part output
	part.index = o.index
	if err := part.view(&c.model.sig, r); err != nil {
		return err
	}
	if o.dtype == 0 { // the first part
		spec := &c.model.sig.Outputs[o.index]
		most := c.rows * spec.RowBytes()
		if err := c.take(most); err != nil {
			return err
		}
		o.dtype, o.shape, o.size = part.dtype, append(o.shape[:0], part.shape...), 0
		o.shape[0] = 0
		o.parts = append(o.parts[:0], make([]byte, 0, c.rows*part.size/r.Rows()))
	}
	if !slices.Equal(o.shape[1:], part.shape[1:]) {
		return fmt.Errorf("%w: output %q has rows of shape %v and of shape %v: ask for fewer rows at once", status.ErrShape, o.name, o.shape[1:], part.shape[1:])
	}
	for _, p := range part.parts {
		o.parts[0] = append(o.parts[0], p...)
	}
	o.shape[0] += part.shape[0]
	o.size += part.size
	return nil
}

func (c *call) addTiming(r client.Request) {
	if t, err := r.Timing(); err == nil {
		c.queue += t.Claim + t.Queue + t.Dispatch
		c.compute += t.Compute
	}
}

// release gives everything back. The outputs must not be read any more.
func (c *call) release() {
	if c.claimed {
		_ = c.request.Release()
		c.claimed = false
	}
	c.relayed.release()
	c.giveShareBack()
	if c.taken > 0 {
		c.model.g.limits.giveBack(c.caller.use, c.taken)
		c.taken = 0
	}
	c.releaseRegions()
}
