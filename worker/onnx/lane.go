// SPDX-License-Identifier: Apache-2.0

package onnx

import (
	"context"
	"fmt"

	ort "github.com/yalue/onnxruntime_go"
	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/worker"
)

// lane runs batches, one at a time.
type lane struct {
	m       *model
	in, out []buffer // for rows that are not contiguous
}

func newLane(m *model) (*lane, error) {
	for _, n := range append(append([]node{}, m.inputs...), m.outputs...) {
		if n.spec.RowBytes() == 0 {
			return nil, fmt.Errorf("%w: %q has rows without elements", ErrModel, n.name)
		}
	}
	return &lane{m: m, in: make([]buffer, len(m.inputs)), out: make([]buffer, len(m.outputs))}, nil
}

func (l *lane) close() {
	for _, b := range append(l.in, l.out...) {
		if b != nil {
			_ = unix.Munmap(b)
		}
	}
}

func (l *lane) run(_ context.Context, b *worker.Batch) error {
	rows := b.PadTo()
	in, out := make([]ort.Value, len(l.in)), make([]ort.Value, len(l.out))
	defer destroy(in)
	defer destroy(out)
	for k := range l.in {
		data, apart, err := l.in[k].whole(b.Input(k), rows)
		if err == nil && apart {
			for i := range rows {
				copy(data[i*b.Input(k).RowBytes():], b.Input(k).Bytes(i))
			}
		}
		if err == nil {
			in[k], err = value(&l.m.inputs[k], rows, data)
		}
		if err != nil {
			return err
		}
	}
	scattered := make([][]byte, len(l.out))
	for k := range l.out {
		data, apart, err := l.out[k].whole(b.Output(k), rows)
		if err == nil {
			out[k], err = value(&l.m.outputs[k], rows, data)
		}
		if err != nil {
			return err
		}
		if apart {
			scattered[k] = data
		}
	}
	if err := l.m.session.Run(in, out); err != nil {
		return fmt.Errorf("onnxruntime: %s", firstLine(err))
	}
	for k, data := range scattered {
		if data == nil {
			continue
		}
		c := b.Output(k)
		for i := range b.Rows() {
			copy(c.Bytes(i), data[i*c.RowBytes():])
		}
	}
	return nil
}

// value is a number of rows as a value of ONNX Runtime, or a nil interface and an error.
func value(n *node, rows int, data []byte) (ort.Value, error) {
	v, err := ort.NewCustomDataTensor(n.shape(rows), data, n.kind)
	if err != nil {
		return nil, err
	}
	return v, nil
}

// buffer is memory outside of the Go heap: ONNX Runtime keeps a pointer to it.
type buffer []byte

// whole is memory for all rows of a column: in the ring if the rows are contiguous,
// otherwise (apart) the buffer, which grows.
func (b *buffer) whole(c worker.Column, rows int) (data []byte, apart bool, err error) {
	if t, ok := c.Contiguous(); ok {
		return t.Data, false, nil
	}
	size := rows * c.RowBytes()
	if size > len(*b) {
		if *b != nil {
			if err := unix.Munmap(*b); err != nil {
				return nil, true, err
			}
			*b = nil
		}
		if *b, err = unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE); err != nil {
			return nil, true, fmt.Errorf("a buffer of %d bytes: %w", size, err)
		}
	}
	return (*b)[:size], true, nil
}
