// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"

	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/worker"
	"github.com/ringbatch/ringbatch/worker/cpu"
	"github.com/ringbatch/ringbatch/worker/cuda"
)

// gpuArgs are the flags of `ringbatch worker` about GPUs.
type gpuArgs struct {
	cuda.Options
	outputs []string
	given   func(flag string) bool
}

func gpuFlags(f *flagSet) *gpuArgs {
	g := &gpuArgs{given: f.Changed}
	f.IntVar(&g.Device, "gpu", 0, "run the model on this visible GPU (models: affine, echo, mlp)")
	f.StringVar(&g.Weights, "weights", "", "mlp: an .npz `FILE` of torch's 0.weight [out, in], 0.bias, …, with ReLU between layers; --ptx: a file that the kernel gets as it is")
	f.StringVar(&g.PTX, "ptx", "", "serve your own kernel from this PTX file (see docs/gpu.md)")
	f.StringVar(&g.Kernel, "kernel", "forward", "--ptx: the function in it")
	f.StringArrayVar(&g.outputs, "output", nil, "--ptx: output tensor, a `SPEC` like y:f32[8] (repeatable)")
	f.IntVar(&g.Block, "block", 256, "--ptx: threads per block")
	f.IntVar(&g.Work, "threads-per-row", 0, "--ptx: threads launched per row (default: elements of a row of the first output)")
	return g
}

func (g *gpuArgs) ownKernel() bool { return g.PTX != "" }

// served describes a worker's model.
type served struct {
	Signature tensor.Signature
	Note      string
}

// choose makes the model on the CPU, or on a GPU if the flags ask for one.
func (g *gpuArgs) choose(kind string, o cpu.Options) (served, func(context.Context, worker.Config) error, error) {
	if !g.ownKernel() && !g.given("gpu") {
		o.Weights = g.Weights
		m, err := cpu.New(kind, o)
		if err != nil {
			return served{}, nil, err
		}
		serve := func(ctx context.Context, cfg worker.Config) error { return worker.Serve(ctx, cfg, m.Run) }
		return served{m.Signature, m.Note}, serve, nil
	}
	g.Inputs, g.Scale, g.Offset = o.Inputs, o.Scale, o.Offset
	if g.ownKernel() {
		if kind != "ptx" {
			return served{}, nil, fmt.Errorf("%w: --ptx serves your own kernel: leave the built-in model's name out", errUsage)
		}
		var err error
		if g.Signature, err = tensor.ParseSignature(tensor.SpecTexts(o.Inputs), g.outputs); err != nil {
			return served{}, nil, fmt.Errorf("--input and --output: %w", err)
		}
	}
	m, err := cuda.New(kind, g.Options)
	if err != nil {
		return served{}, nil, err
	}
	serve := func(ctx context.Context, cfg worker.Config) error { return cuda.Serve(ctx, cfg, m) }
	return served{Signature: m.Signature, Note: m.Note}, serve, nil
}

// version is what a built-in worker computes, for worker.Config.
func (g *gpuArgs) version(kind string, o cpu.Options) (string, error) {
	switch {
	case kind == "affine":
		return fmt.Sprintf("affine scale=%g offset=%g", o.Scale, o.Offset), nil
	case !g.ownKernel() && g.Weights == "":
		return kind, nil
	}
	h := sha256.New()
	fmt.Fprintln(h, g.Kernel, g.Block, g.Work)
	for _, file := range []string{g.PTX, g.Weights} {
		if file == "" {
			continue
		}
		text, err := os.ReadFile(file)
		if err != nil {
			return "", err
		}
		fmt.Fprintln(h, len(text))
		h.Write(text)
	}
	if !g.ownKernel() {
		return fmt.Sprintf("%s %x", kind, h.Sum(nil)[:6]), nil
	}
	return fmt.Sprintf("%s %s %x", filepath.Base(g.PTX), g.Kernel, h.Sum(nil)[:6]), nil
}
