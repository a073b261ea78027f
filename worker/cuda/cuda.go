// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"errors"
	"slices"

	"github.com/ringbatch/ringbatch/tensor"
)

// ErrLost is what Serve ends with when the GPU or its context is gone. Only a
// new process can go on.
var ErrLost = errors.New("the GPU or its context was lost; this worker must be started again")

// Options are the knobs of all models; each uses some.
type Options struct {
	Device int // number among the visible GPUs

	Inputs        []tensor.Spec // echo, affine; default x:f32[16]
	Scale, Offset float64       // affine: y = Scale·x + Offset

	// mlp: as on the CPU, from a seed.
	Sizes   []int
	Seed    int64
	Weights string // mlp: see mlp.Load; ptx: a file, put into device memory as it is

	// ptx: the user's own kernel, see docs/gpu.md for how it is launched.
	PTX       string // file
	Kernel    string // function in it
	Signature tensor.Signature
	Block     int // threads per block; default 256
	Work      int // threads per row; default: elements of a row of the first output
}

// Names lists the built-in models.
func Names() []string { return slices.Clone([]string{"affine", "echo", "mlp", "ptx"}) }
