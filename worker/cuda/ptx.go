// SPDX-License-Identifier: Apache-2.0

//go:build cuda

package cuda

import (
	"fmt"
	"io"
	"unsafe"

	"gorgonia.org/cu"

	"github.com/ringbatch/ringbatch/internal/trust"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

// newPTX serves the user's own kernel. How it is launched is a contract,
// written down in docs/gpu.md:
//
//	kernel(in0, in1, …, out0, out1, …, rows, shapes, weights)
//
// one pointer per tensor in the order of the signature, to rows packed one
// after the other; rows as a 64-bit number; shapes, a pointer to the 64-bit
// row dimensions of all inputs, then all outputs; weights, a pointer to the
// bytes of the file, or null. A kernel may leave out parameters at the end.
func newPTX(o Options) (*Model, error) {
	if o.PTX == "" || o.Kernel == "" {
		return nil, fmt.Errorf("%w: a kernel of your own needs a PTX file and the name of a function in it", status.ErrInvalid)
	}
	if err := o.Signature.Validate(); err != nil {
		return nil, err
	}
	code, err := readFile(o.PTX)
	if err != nil {
		return nil, err
	}
	var weights []byte
	if o.Weights != "" {
		if weights, err = readFile(o.Weights); err != nil {
			return nil, err
		}
	}
	p := &userKernel{sig: o.Signature, block: o.Block, work: o.Work}
	if p.block == 0 {
		p.block = 256
	}
	if p.block < 1 || p.block > 1024 || p.work < 0 {
		return nil, fmt.Errorf("%w: %d threads per block (1..1024), %d per row", status.ErrInvalid, p.block, p.work)
	}
	if p.work == 0 {
		p.work = o.Signature.Outputs[0].RowBytes() / o.Signature.Outputs[0].DType.Size()
	}
	return &Model{Signature: o.Signature, load: func(d *device) (program, error) {
		return p, p.load(d, o, string(code), weights)
	}}, nil
}

// readFile reads a file that no other user can have written.
func readFile(path string) ([]byte, error) {
	f, err := trust.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(f)
}

type userKernel struct {
	plain
	sig         tensor.Signature
	block, work int
	kernel      cu.Function
	weights     cu.DevicePtr
}

func (p *userKernel) load(d *device, o Options, code string, weights []byte) error {
	m, err := d.module(o.PTX, code)
	if err != nil {
		return err
	}
	if p.kernel, err = function(m, o.Kernel); err != nil {
		return err
	}
	if len(weights) == 0 {
		return nil
	}
	if p.weights, err = alloc(int64(len(weights))); err != nil {
		return err
	}
	return checked("cuMemcpyHtoD", cu.MemcpyHtoD(p.weights, unsafe.Pointer(&weights[0]), int64(len(weights))))
}

// shapes is pinned memory with every tensor's row dimensions, as pairs of
// 32-bit halves.
type shapes struct {
	words []uint32
	dev   cu.DevicePtr
}

func (p *userKernel) prepare(l *lane, _ int) (err error) {
	n := 1
	for _, side := range [][]tensor.Spec{p.sig.Inputs, p.sig.Outputs} {
		for _, t := range side {
			n += len(t.Shape)
		}
	}
	s := &shapes{}
	s.words, s.dev, err = hostWords(2 * n)
	l.scratch = s
	return err
}

func (p *userKernel) enqueue(l *lane) error {
	b, s := l.batch, l.scratch.(*shapes)
	at := 0
	put := func(shape []int) {
		for _, d := range shape {
			s.words[at], s.words[at+1] = uint32(d), 0
			at += 2
		}
	}
	var args []uint64
	for k, in := range l.in {
		args = append(args, word(in))
		put(b.RowShape(0, k))
	}
	for k, out := range l.out {
		args = append(args, word(out))
		put(b.RowShape(1, k))
	}
	args = append(args, word(b.PadTo()), word(s.dev), word(p.weights))
	threads := b.PadTo() * p.work
	return launch(l.stream, p.kernel, dims{gridX: (threads + p.block - 1) / p.block, block: p.block}, args...)
}
