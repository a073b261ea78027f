// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"fmt"
	"sync/atomic"

	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

// Column is one tensor of a batch, over all its rows.
type Column struct {
	b     *Batch
	plane *shm.Plane
	shape []int // of a row: rounded up to buckets for inputs, the maximum for outputs
	side  side
	k     int    // which of its side
	bit   uint64 // in Batch.asked, of tensors that the worker writes: outputs, then next states
}

type side int

const (
	input side = iota
	output
	state     // the half that a step reads
	nextState // the half that it writes
)

// Input is the k-th input, not to be written.
func (b *Batch) Input(k int) Column { return b.column(b.w.session.Layout.Inputs, k, input) }

// Output is the k-th output. The worker writes all rows that do not fail.
func (b *Batch) Output(k int) Column { return b.column(b.w.session.Layout.Outputs, k, output) }

func (b *Batch) column(planes []shm.Plane, k int, side side) Column {
	p := &planes[k]
	shape := p.Spec.Shape
	if side == input && len(p.Spec.Variable) > 0 {
		shape = p.Spec.Actual(b.dims[:], dimsAt(planes, k))
	}
	c := Column{b: b, plane: p, shape: shape, side: side, k: k}
	switch side {
	case output:
		c.bit = 1 << k
	case nextState:
		c.bit = 1 << (len(b.w.session.Layout.Outputs) + k)
	}
	return c
}

// Spec describes the tensor.
func (c Column) Spec() *tensor.Spec { return &c.plane.Spec }

// RowShape is the shape of all rows; if Ragged, it holds the largest.
func (c Column) RowShape() []int { return c.shape }

// RowBytes is the size of a row of RowShape.
func (c Column) RowBytes() int { return c.bytesOf(c.shape) }

func (c Column) bytesOf(shape []int) int {
	n := c.plane.Spec.DType.Size()
	for _, d := range shape {
		n *= d
	}
	return n
}

// ragged reports whether the rows of this column may differ in shape.
func (c Column) ragged() bool {
	return c.side == input && len(c.plane.Spec.Variable) > 0 && len(c.b.reqs) > 1 && c.b.Ragged()
}

// shapeOf is the shape of row i.
func (c Column) shapeOf(i int) []int {
	if c.ragged() && i < len(c.b.slots) {
		return c.b.InputShape(c.b.requestOf(i), c.k)
	}
	return c.shape
}

// Bytes is row i in place. From Batch.Rows() to PadTo() it is padding: zero for inputs,
// scratch for outputs. It panics for any other row, which fails the batch.
func (c Column) Bytes(i int) []byte {
	if most := max(len(c.b.slots), c.b.padTo); uint(i) >= uint(most) {
		panic(fmt.Errorf("%w: row %d of %q: the batch has rows 0 to %d", status.ErrRows, i, c.plane.Spec.Name, most-1))
	}
	if i >= len(c.b.slots) {
		return c.b.padding[c.side&1][:c.RowBytes()]
	}
	c.ask(i, 1)
	if c.side >= state {
		return c.b.w.session.Layout.HalfRow(c.b.w.session.Planes.Bytes(), c.k, c.b.slots[i], c.b.steps[i].Half()^int(c.side&1))
	}
	return c.plane.Row(c.b.w.session.Planes.Bytes(), c.b.slots[i])[:c.bytesOf(c.shapeOf(i))]
}

// Row is row i in place, as elements. It panics if T is another type.
func Row[T tensor.Element](c Column, i int) []T {
	t := tensor.Tensor{Name: c.plane.Spec.Name, DType: c.plane.Spec.DType, Shape: append([]int{1}, c.shapeOf(i)...), Data: c.Bytes(i)}
	s, err := tensor.As[T](t)
	if err != nil {
		panic(err)
	}
	return s
}

// Texts are the texts of row i of a str tensor. Padding has empty ones. It panics if a text
// is not UTF-8, which fails the batch, and in the end only that text's request.
func (c Column) Texts(i int) []string {
	if i >= len(c.b.slots) {
		return make([]string, c.plane.Spec.RowElems()/c.plane.Spec.TextBytes())
	}
	t := tensor.Tensor{Name: c.plane.Spec.Name, DType: c.plane.Spec.DType, Shape: append([]int{1}, c.shape...), Data: c.Bytes(i)}
	texts, err := tensor.Texts(t)
	if err != nil {
		panic(err)
	}
	return texts
}

// SetTexts writes row i of a str output. It fails the row's request if a text is too long,
// or not UTF-8.
func (c Column) SetTexts(i int, texts ...string) {
	t, err := c.plane.Spec.OfTexts(texts)
	if err == nil && t.Rows() != 1 {
		err = fmt.Errorf("%w: %d texts for a row of %s", status.ErrSize, len(texts), c.plane.Spec)
	}
	to := c.Bytes(i)
	if err != nil {
		c.b.Fail(c.b.requestOf(i), fmt.Errorf("output %w", err))
		return
	}
	copy(to, t.Data)
}

// Contiguous is all rows as one tensor; false if there are gaps.
func (c Column) Contiguous() (tensor.Tensor, bool) {
	if len(c.b.runs) != 1 || c.side >= state || c.b.padTo > len(c.b.slots) || c.ragged() {
		return tensor.Tensor{}, false
	}
	t := c.Run(0)
	return t, t.Contiguous()
}

// ask records that the worker gets the memory of some rows.
func (c Column) ask(row, rows int) {
	if c.bit == 0 {
		return
	}
	if rows == len(c.b.slots) {
		setBit(&c.b.asked, c.bit)
		return
	}
	for i := row; i < row+rows; i++ {
		setBit(&c.b.askedOf[i], c.bit)
	}
}

func setBit(word *atomic.Uint64, bit uint64) {
	if word.Load()&bit == 0 {
		word.Or(bit)
	}
}

// RunBytes is the memory of the i-th run, with gaps.
func (c Column) RunBytes(i int) []byte {
	if c.side >= state {
		panic(fmt.Errorf("%w: the state %q has no runs; take it row by row", status.ErrInvalid, c.plane.Spec.Name))
	}
	r := c.b.runs[i]
	c.ask(r.Row, r.Rows)
	return c.plane.Rows(c.b.w.session.Planes.Bytes(), r.Slot, r.Rows)
}

// Run is the i-th run as one tensor. States, and variable inputs if Ragged, have none.
func (c Column) Run(i int) tensor.Tensor {
	return tensor.Tensor{
		Name: c.plane.Spec.Name, DType: c.plane.Spec.DType, Shape: append([]int{c.b.runs[i].Rows}, c.shape...), Stride: int(c.plane.Stride),
		Data: c.RunBytes(i),
	}
}
