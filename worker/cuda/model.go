// SPDX-License-Identifier: Apache-2.0

//go:build cuda

package cuda

import (
	"fmt"
	"strings"

	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/worker"
	"github.com/ringbatch/ringbatch/worker/cpu"
)

// Model is a model on the GPU, ready to be served.
type Model struct {
	Signature tensor.Signature
	Note      string // for the user
	options   Options
	load      func(*device) (program, error)
}

// program is a model whose kernels and weights are on the device.
type program interface {
	// inPlace: outputs are written over inputs.
	inPlace() bool
	// readsSlots: the kernels only read inputs, and only the batch's rows, so the rows may stay in their slots.
	readsSlots() bool
	// prepare makes the model's buffers of a lane, for at most some rows.
	prepare(l *lane, rows int) error
	// enqueue queues the kernels that turn l.in into l.out.
	enqueue(l *lane) error
	// finish may still set output dimensions before the answer.
	finish(b *worker.Batch) error
}

// New makes the built-in model of that name. It checks the options, and that
// there is a GPU, without using it.
func New(name string, o Options) (*Model, error) {
	if err := load(); err != nil {
		return nil, err
	}
	return newModel(name, o)
}

func newModel(name string, o Options) (*Model, error) {
	kinds := map[string]func(Options) (*Model, error){"echo": newEcho, "affine": newAffine, "mlp": newMLP, "ptx": newPTX}
	make, ok := kinds[name]
	if !ok {
		return nil, fmt.Errorf("%w: no GPU model %q; there are %s", status.ErrInvalid, name, strings.Join(Names(), ", "))
	}
	m, err := make(o)
	if err != nil {
		return nil, err
	}
	m.options = o
	return m, nil
}

// plain has the methods that most programs share.
type plain struct{ variable int }

func (plain) inPlace() bool            { return false }
func (plain) readsSlots() bool         { return false }
func (plain) prepare(*lane, int) error { return nil }

// finish gives every request's outputs the variable sizes of its inputs.
func (p plain) finish(b *worker.Batch) error { return cpu.MirrorDims(b, p.variable) }
