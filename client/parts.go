// SPDX-License-Identifier: Apache-2.0

package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"

	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

// Part is what a worker has added to the growing output of a request: the first output of
// which only the first dimension varies. Its shape begins with the number of new steps.
type Part struct {
	tensor.Tensor

	// Restarted says that the row began again, on another worker. The parts before this one
	// do not count any more. The part may be empty.
	Restarted bool
}

// parts is what the caller has taken of a stream.
type parts struct {
	fromStart bool
	awaited   bool      // await ends with a part
	seen      shm.Shown // at the last look
	attempt   uint32    // that the caller's steps are of; before the first one, of an earlier request
	taken     uint32    // steps
	begun     bool      // the caller was given a part
}

// Stream sends one row and yields its answer in parts, while a worker shows them
// (worker.Batch.Show), until ctx ends. Joined since the last restart, they are the answer.
// If the caller stops, the request is canceled.
func (c *Client) Stream(ctx context.Context, inputs ...any) iter.Seq2[Part, error] {
	return func(yield func(Part, error) bool) {
		r, err := c.Fill(ctx, inputs...)
		if err == nil {
			defer r.Release()
			err = r.SetParts(true)
		}
		if err == nil {
			err = r.Commit(ctx)
		}
		for err == nil {
			var part Part
			part, err = r.NextPart(ctx)
			if err == nil && !yield(part, nil) {
				return
			}
		}
		if !errors.Is(err, io.EOF) {
			yield(Part{}, err)
		}
	}
}

// SetParts, before Commit, makes NextPart give the answer of a request of one row in
// parts. If the row begins again, the next part says so or, without fromStart, NextPart
// returns ErrRestarted.
func (r Request) SetParts(fromStart bool) error {
	s, err := r.claimedSlot()
	switch {
	case err != nil:
		return err
	case s.rows != 1:
		return fmt.Errorf("%w: a stream has one row, this request has %d", status.ErrRows, s.rows)
	}
	layout := r.link.session.Layout
	if k, _ := layout.Growing(); k < 0 {
		return shm.NoGrowing(&layout.Signature)
	}
	s.stream, s.parts = true, parts{fromStart: fromStart}
	return nil
}

// NextPart waits for the next part, until ctx ends. After the last part of a request that
// ended well it returns io.EOF; Output then has all outputs.
func (r Request) NextPart(ctx context.Context) (Part, error) {
	s, err := r.committedSlot()
	if err == nil && !s.stream {
		err = fmt.Errorf("%w: SetParts was not called before Commit", status.ErrInvalid)
	}
	for err == nil {
		part, taken, bad := r.takePart(s)
		if taken || bad != nil {
			return part, bad
		}
		s.parts.awaited = true
		if err = r.await(ctx); err == nil && ctx.Err() != nil && !r.link.hasEnded(r.at) {
			err = fromContext(ctx.Err()) // a broken worker's word may change all the time
		}
	}
	return Part{}, err
}

// takePart copies what is new; false if nothing is.
func (r Request) takePart(s *slot) (part Part, taken bool, err error) {
	l, slot := r.link, r.link.first+r.at
	k, dim := l.session.Layout.Growing()
	plane, p := &l.session.Layout.Outputs[k], &s.parts
	ended := l.hasEnded(r.at) // first: nothing is shown after the end
	p.seen = l.board.Shown(slot)
	size, most := p.seen.Steps(), uint32(plane.Spec.Shape[0])
	if p.seen.Attempt() == p.attempt && !p.begun || !l.board.Grows(slot, plane) {
		size = 0 // an earlier request's
	}
	if ended {
		if err = r.outcome(s); err != nil {
			return Part{}, false, err
		}
		size = r.rowDims(0)[dim]
	}
	restarted := p.seen.Attempt() != p.attempt && p.begun
	from := p.taken
	switch {
	case restarted && !p.fromStart:
		return Part{}, false, status.ErrRestarted
	case restarted:
		from = 0
	}
	switch {
	case size > most || size < from:
		return Part{}, false, fmt.Errorf("%w: a worker shows %d steps of %s, after %d", status.ErrProtocol, size, plane.Spec, from)
	case size == from && !restarted && ended:
		return Part{}, false, io.EOF
	case size == from && !restarted:
		return Part{}, false, nil
	}
	step := plane.StepBytes()
	row := plane.Row(l.session.Planes.Bytes(), slot)
	part = Part{Restarted: restarted, Tensor: tensor.Tensor{
		Name: plane.Spec.Name, DType: plane.Spec.DType, Data: append([]byte(nil), row[int(from)*step:int(size)*step]...),
		Shape: append([]int{int(size - from)}, plane.Spec.Shape[1:]...),
	}}
	l.board.AfterCopy()
	if !ended && l.board.Shown(slot).Attempt() != p.seen.Attempt() {
		return Part{}, false, nil // a worker died, and another attempt may have overwritten the steps
	}
	p.attempt, p.taken, p.begun = p.seen.Attempt(), size, true
	return part, true, nil
}

// isReady reports whether await is over.
func (l *link) isReady(i uint32) bool { return l.hasEnded(i) || l.hasPart(i) }

// hasPart reports whether an awaited part may be there.
func (l *link) hasPart(i uint32) bool {
	p := &l.slots[i].parts
	return p.awaited && l.board.Shown(l.first+i) != p.seen
}
