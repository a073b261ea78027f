// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"fmt"
	"os"
	"strconv"

	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/worker"
	"github.com/ringbatch/ringbatch/worker/cuda"
)

// gpuLanes is how many batches a model process has in flight on the GPU:
// $GPU_LANES, or two. It holds for the bound of the CUDA models too; that of
// torch is by definition N processes with one batch each (see gpu_torch.go).
func gpuLanes() int {
	if n, err := strconv.Atoi(os.Getenv("GPU_LANES")); err == nil && n > 0 {
		return n
	}
	return 2
}

// gpuKinds are the models that need a GPU. They are listed everywhere; where
// there is none, opening them says so.
func gpuKinds() map[string]modelKind {
	return map[string]modelKind{
		"cuda-echo": { // gives its input back, by way of the GPU
			dtypes: []string{"u8", "i32", "f16", "f32"},
			size:   shapedSize, open: openCUDA,
		},
		"cuda-mlp": { // the perceptron on the GPU; --data_type is that of its matrix products
			dtypes:    []string{"f32", "f16", "bf16"},
			takesPath: true, size: mlpSize, open: openCUDA,
		},
		"torch": { // a file or import path (--model_path), by PyTorch; float16 is computed channels last
			dtypes: []string{"f32", "f16"}, takesPath: true, size: torchSize, open: openTorch,
		},
	}
}

func openCUDA(j modelJob) (*openModel, error) {
	o := cuda.Options{Weights: j.Path, Seed: j.Seed, Precision: j.DType}
	name := "mlp"
	if j.Type == "cuda-echo" {
		name = "echo"
		spec, err := j.input()
		if err != nil {
			return nil, err
		}
		o.Inputs = []tensor.Spec{spec}
	}
	m, err := cuda.New(name, o)
	if err != nil {
		return nil, err
	}
	return &openModel{
		Signature: m.Signature,
		Alone: func(rows int) func() {
			run, err := cuda.Alone(m, rows, gpuLanes())
			must(err)
			return func() { must(run()) }
		},
		Serve: func(cfg worker.Config) (int, func() error, error) {
			cfg.Signature, cfg.Depth = m.Signature, gpuLanes()
			return os.Getpid(), func() error { return cuda.Serve(background, cfg, m) }, nil
		},
	}, nil
}

// must ends a child whose model cannot go on; its parent shows what it wrote.
func must(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
