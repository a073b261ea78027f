// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"

	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/worker"
	"github.com/ringbatch/ringbatch/worker/cpu"
	"github.com/ringbatch/ringbatch/worker/cuda"
)

// gpuArgs are the flags of `ringbatch worker` about GPUs.
type gpuArgs struct {
	device            *int
	precision         *string
	weights           *string
	ptx, kernel       *string
	outputs           *[]string
	block, perRow     *int
	deviceWasAskedFor func() bool
}

func gpuFlags(f *flagSet) *gpuArgs {
	return &gpuArgs{
		device:            f.Int("gpu", 0, "run the model on this visible GPU (models: affine, echo, mlp)"),
		precision:         f.String("precision", "f32", "mlp on a GPU: f32, f16 or bf16 for its matrix products"),
		weights:           f.String("weights", "", "--ptx: a file that the kernel gets as it is"),
		ptx:               f.String("ptx", "", "serve your own kernel from this PTX file (see docs/gpu.md)"),
		kernel:            f.String("kernel", "forward", "--ptx: the function in it"),
		outputs:           f.StringArray("output", nil, "--ptx: output tensor, a `SPEC` like y:f32[8] (repeatable)"),
		block:             f.Int("block", 256, "--ptx: threads per block"),
		perRow:            f.Int("threads-per-row", 0, "--ptx: threads launched per row (default: elements of a row of the first output)"),
		deviceWasAskedFor: func() bool { return f.Changed("gpu") },
	}
}

func (g *gpuArgs) ownKernel() bool { return *g.ptx != "" }

// served describes a worker's model.
type served struct {
	Signature tensor.Signature
	Note      string
}

// choose makes the model on the CPU, or on a GPU if the flags ask for one.
func (g *gpuArgs) choose(kind string, o cpu.Options) (served, func(context.Context, worker.Config) error, error) {
	if !g.ownKernel() && !g.deviceWasAskedFor() {
		m, err := cpu.New(kind, o)
		if err != nil {
			return served{}, nil, err
		}
		serve := func(ctx context.Context, cfg worker.Config) error { return worker.Serve(ctx, cfg, m.Run) }
		return served{m.Signature, m.Note}, serve, nil
	}
	options := cuda.Options{
		Device: *g.device, Inputs: o.Inputs, Scale: o.Scale, Offset: o.Offset, Precision: *g.precision, Weights: *g.weights,
		PTX: *g.ptx, Kernel: *g.kernel, Block: *g.block, Work: *g.perRow,
	}
	if g.ownKernel() {
		if kind != "ptx" {
			return served{}, nil, fmt.Errorf("%w: --ptx serves your own kernel: leave the built-in model's name out", errUsage)
		}
		var err error
		if options.Signature, err = tensor.ParseSignature(tensor.SpecTexts(o.Inputs), *g.outputs); err != nil {
			return served{}, nil, fmt.Errorf("--input and --output: %w", err)
		}
	}
	m, err := cuda.New(kind, options)
	if err != nil {
		return served{}, nil, err
	}
	return served{m.Signature, m.Note}, func(ctx context.Context, cfg worker.Config) error { return cuda.Serve(ctx, cfg, m) }, nil
}
