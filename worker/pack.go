// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"fmt"
	"math"

	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

// Pack copies all rows of the k-th input one after the other, each in its true size and
// without padding. Row i is offsets[i] to offsets[i+1], in steps of the first dimension;
// n is the number of bytes. If to is too small, err is ErrSize, and n is the number
// needed. ErrShape: another dimension than the first varies.
func (b *Batch) Pack(k int, to []byte) (offsets []int32, n int, err error) {
	inputs := b.w.session.Layout.Inputs
	offsets, step, n, err := b.packedRows(&inputs[k], dimsAt(inputs, k), len(to))
	for i := 0; err == nil && i < len(b.slots); i++ {
		copy(to[int(offsets[i])*step:int(offsets[i+1])*step], inputs[k].Row(b.w.session.Planes.Bytes(), b.slots[i]))
	}
	return offsets, n, err
}

// Unpack copies packed rows of the k-th output to their slots. If the first dimension
// varies, each row has the size of its first variable input, and Unpack sets the row's
// size. ErrShape: the output cannot hold a row, or another dimension varies.
func (b *Batch) Unpack(k int, from []byte) error {
	outputs := b.w.session.Layout.Outputs
	offsets, step, _, err := b.packedRows(&outputs[k], 0, len(from))
	for i := 0; err == nil && i < len(b.slots); i++ {
		copy(outputs[k].Row(b.w.session.Planes.Bytes(), b.slots[i]), from[int(offsets[i])*step:int(offsets[i+1])*step])
		if len(outputs[k].Spec.Variable) > 0 {
			b.outDims[i][dimsAt(outputs, k)] = uint32(offsets[i+1] - offsets[i])
		}
	}
	if err == nil {
		b.Output(k).ask(0, len(b.slots))
	}
	return err
}

// packedRows finds where the packed rows of a tensor begin, the bytes of one step of its
// first dimension, and the bytes in all. A variable one has the size at, among those of the inputs.
func (b *Batch) packedRows(p *shm.Plane, at, room int) (offsets []int32, step, n int, err error) {
	varies, most, total := len(p.Spec.Variable) > 0, 1, 0
	if varies && (len(p.Spec.Variable) > 1 || p.Spec.Variable[0] != 0 || tensor.VariableDims(b.w.session.Layout.Signature.Inputs) == 0) {
		return nil, 0, 0, fmt.Errorf("%w: the rows of %q cannot be packed: only the first dimension may vary, as that of an input does",
			status.ErrShape, p.Spec.Name)
	}
	if len(p.Spec.Shape) > 0 {
		most = p.Spec.Shape[0]
	}
	offsets = make([]int32, 1, len(b.slots)+1)
	for i, q := range b.reqs {
		size := most
		if varies {
			size = int(b.mails[q.mail].Dims[at])
		}
		if size > most {
			return nil, 0, 0, fmt.Errorf("%w: %q has at most %d, request %d has rows of %d", status.ErrShape, p.Spec.Name, most, i, size)
		}
		for range q.rows {
			total += size
			offsets = append(offsets, int32(total))
		}
	}
	step = int(p.Stride) / most
	if n = total * step; n > room || total > math.MaxInt32 {
		err = fmt.Errorf("%w: %d packed rows have %d bytes, there are %d", status.ErrSize, len(b.slots), n, room)
	}
	return offsets, step, n, err
}
