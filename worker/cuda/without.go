// SPDX-License-Identifier: Apache-2.0

//go:build !cuda

package cuda

import (
	"context"
	"fmt"

	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/worker"
)

// Built says whether this binary has GPU workers at all.
const Built = false

var errNotBuilt = fmt.Errorf("%w: this build has no GPU kernels of its own; use ringbatch torch or ringbatch onnx, "+
	"or a build with them (make cuda-build in a clone)", status.ErrNoGPU)

// Model is a model on the GPU; without the tag there is none.
type Model struct {
	Signature tensor.Signature
	Note      string
}

// New refuses: this build has no GPU workers.
func New(string, Options) (*Model, error) { return nil, errNotBuilt }

// Serve refuses: this build has no GPU workers.
func Serve(context.Context, worker.Config, *Model) error { return errNotBuilt }

// Describe says which GPUs there are, or why there are none.
func Describe() ([]string, error) { return nil, errNotBuilt }
