// SPDX-License-Identifier: Apache-2.0

package client

import (
	"fmt"
	"slices"

	"github.com/ringbatch/ringbatch/internal/pad"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

// Input is a view of an input's rows, to write before Commit.
func (r Request) Input(name string) (tensor.Tensor, error) {
	s, err := r.claimedSlot()
	if err != nil {
		return tensor.Tensor{}, err
	}
	l := r.link.session.Layout
	dims := r.link.padded(s)
	at := 0
	for i := range l.Inputs {
		p := &l.Inputs[i]
		if p.Spec.Name == name {
			return r.view(p, 0, s.rows, dims[:], at), nil
		}
		at += len(p.Spec.Variable)
	}
	return tensor.Tensor{}, fmt.Errorf("%w: no input %q; the model has %s", status.ErrInvalid, name, &l.Signature)
}

// Output is a view until Release; ErrShape if rows differ in size.
func (r Request) Output(name string) (tensor.Tensor, error) {
	s, err := r.doneSlot()
	if err != nil {
		return tensor.Tensor{}, err
	}
	p, at, err := r.outputPlane(name)
	if err != nil {
		return tensor.Tensor{}, err
	}
	own := func(row uint32) []uint32 {
		dims := r.rowDims(row)
		return dims[at : at+len(p.Spec.Variable)]
	}
	if first := own(0); len(first) > 0 {
		for row := uint32(1); row < s.rows; row++ {
			if !slices.Equal(own(row), first) {
				err := fmt.Errorf("%w: the rows of output %q differ in size; take them with OutputRow", status.ErrShape, name)
				return tensor.Tensor{}, err
			}
		}
	}
	dims := r.rowDims(0)
	return r.view(p, 0, s.rows, dims[:], at), nil
}

// OutputRow is a view of one row, in its own size.
func (r Request) OutputRow(name string, row int) (tensor.Tensor, error) {
	s, err := r.doneSlot()
	if err != nil {
		return tensor.Tensor{}, err
	}
	p, at, err := r.outputPlane(name)
	if err != nil {
		return tensor.Tensor{}, err
	}
	if row < 0 || row >= int(s.rows) {
		return tensor.Tensor{}, fmt.Errorf("%w: row %d of a request of %d", status.ErrRows, row, s.rows)
	}
	dims := r.rowDims(uint32(row))
	return r.view(p, uint32(row), 1, dims[:], at), nil
}

func (r Request) outputPlane(name string) (p *shm.Plane, dimsAt int, err error) {
	l := r.link.session.Layout
	for i := range l.Outputs {
		p := &l.Outputs[i]
		if p.Spec.Name == name {
			return p, dimsAt, nil
		}
		dimsAt += len(p.Spec.Variable)
	}
	return nil, 0, fmt.Errorf("%w: no output %q; the model has %s", status.ErrInvalid, name, &l.Signature)
}

// rowDims are the sizes of one row's outputs, at most the size of the slot.
func (r Request) rowDims(row uint32) [tensor.MaxVariableDims]uint32 {
	return clampDims(r.link.session.Layout.Outputs, r.link.board.Record(r.link.first+r.at+row).Dims)
}

// InputBytes is the memory of the k-th input: quickest for fixed shapes.
func (r Request) InputBytes(k int) ([]byte, error) {
	s, err := r.claimedSlot()
	if err != nil {
		return nil, err
	}
	l := r.link
	return l.session.Layout.Inputs[k].Rows(l.session.Planes.Bytes(), l.first+r.at, int(s.rows)), nil
}

// OutputBytes is the memory of the k-th output.
func (r Request) OutputBytes(k int) ([]byte, error) {
	s, err := r.doneSlot()
	if err != nil {
		return nil, err
	}
	l := r.link
	return l.session.Layout.Outputs[k].Rows(l.session.Planes.Bytes(), l.first+r.at, int(s.rows)), nil
}

// Version is that of the live weights of the answer; 0: none.
func (r Request) Version() (uint32, error) {
	if _, err := r.doneSlot(); err != nil {
		return 0, err
	}
	return r.link.board.Record(r.link.first + r.at).Version, nil
}

func (r Request) doneSlot() (*slot, error) {
	s, err := r.committedSlot()
	switch {
	case err != nil:
		return nil, err
	case !r.link.hasEnded(r.at):
		return nil, status.ErrNotDone
	}
	return s, r.outcome(s)
}

// view is a tensor of rows of the request, from the given row on.
func (r Request) view(p *shm.Plane, row, rows uint32, dims []uint32, at int) tensor.Tensor {
	l := r.link
	shape := append([]int{int(rows)}, p.Spec.Actual(dims, at)...)
	return tensor.Tensor{
		Name: p.Spec.Name, DType: p.Spec.DType, Shape: shape, Stride: int(p.Stride),
		Data: p.Rows(l.session.Planes.Bytes(), l.first+r.at+row, int(rows)),
	}
}

// clearPadding zeroes the inputs of a request that is smaller than its bucket.
func (l *link) clearPadding(s *slot, at int) {
	if l.padded(s) == s.dims {
		return
	}
	for i := range l.session.Layout.Inputs {
		if p := &l.session.Layout.Inputs[i]; len(p.Spec.Variable) > 0 {
			clear(p.Rows(l.session.Planes.Bytes(), l.first+uint32(at), int(s.rows)))
		}
	}
}

// padded returns the request's sizes, rounded up to the model's buckets.
func (l *link) padded(s *slot) [tensor.MaxVariableDims]uint32 {
	dims := s.dims
	for i, sizes := range l.session.Settings.Buckets {
		if i < len(dims) {
			dims[i] = pad.Bucket(sizes, dims[i])
		}
	}
	return dims
}

// clampDims limits the sizes that a worker reported to the size of the slot.
func clampDims(planes []shm.Plane, dims [tensor.MaxVariableDims]uint32) [tensor.MaxVariableDims]uint32 {
	n := 0
	for _, p := range planes {
		for _, v := range p.Spec.Variable {
			dims[n] = min(dims[n], uint32(p.Spec.Shape[v]))
			n++
		}
	}
	return dims
}
