// SPDX-License-Identifier: Apache-2.0

// Package cpu has the built-in models that run on the CPU, for tests and measurements.
package cpu

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/ringbatch/ringbatch/internal/pad"
	"github.com/ringbatch/ringbatch/internal/typo"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/worker"
)

// Model is a built-in model, ready to be served.
type Model struct {
	Signature tensor.Signature
	Run       worker.Func
	// Alone returns a function that runs the model on private memory of that many rows,
	// without a broker.
	Alone func(rows int) (run func())
	// Note warns the user, for example that the model only simulates; it may be empty.
	Note string
}

// Options are the parameters of all built-in models; each uses some.
type Options struct {
	Inputs []tensor.Spec // echo, affine; default x:f32[16]
	Scale  float64       // affine: a of y = a·x + b
	Offset float64       // affine: b

	Seed    int64  // mlp: its weights follow from it
	Weights string // mlp: an .npz file of them, see mlp.Load

	FixedCost time.Duration // simulated: time per batch
	ItemCost  time.Duration // simulated: time per row
}

// kinds lists the models by name.
var kinds = map[string]func(Options) (*Model, error){
	"echo":      newEcho,
	"affine":    newAffine,
	"mlp":       newMLP,
	"simulated": newSimulated,
}

// Names lists the built-in models.
func Names() []string {
	var names []string
	for name := range kinds {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// New makes the built-in model of that name.
func New(name string, o Options) (*Model, error) {
	make, ok := kinds[name]
	if !ok {
		return nil, fmt.Errorf("%w: no built-in model %q%s; there are %s", status.ErrInvalid, name, typo.DidYouMean(name, Names()),
			strings.Join(Names(), ", "))
	}
	return make(o)
}

// Elementwise is a signature whose outputs mirror the inputs: x → y, and
// x_out for any input not called x.
func Elementwise(inputs []tensor.Spec) tensor.Signature {
	if len(inputs) == 0 {
		inputs = []tensor.Spec{{Name: "x", DType: tensor.F32, Shape: []int{16}}}
	}
	sig := tensor.Signature{Inputs: inputs}
	for _, in := range inputs {
		out := in
		if out.Name = in.Name + "_out"; in.Name == "x" {
			out.Name = "y"
		}
		sig.Outputs = append(sig.Outputs, out)
	}
	return sig
}

// MirrorDims gives every request's outputs the sizes of its inputs. The outputs were
// computed in the batch's shape; if a request is smaller (buckets), MirrorDims removes
// its padding.
func MirrorDims(b *worker.Batch, variable int) error {
	if variable == 0 {
		return nil
	}
	dims := make([]int, variable)
	for i := range b.Len() {
		for j, d := range b.Request(i).Dims()[:variable] {
			dims[j] = int(d)
		}
		if err := b.SetOutputDims(i, dims...); err != nil {
			return err
		}
		if !b.Ragged() && !slices.Equal(b.Request(i).Dims(), b.Dims()) {
			for k := range b.Signature().Outputs {
				unpad(b, i, k)
			}
		}
	}
	return nil
}

// unpad moves the rows of request i in the k-th output together, in place.
func unpad(b *worker.Batch, i, k int) {
	out, from, to := b.Output(k), b.Input(k).RowShape(), b.InputShape(i, k)
	q := b.Request(i)
	for row := q.Row; row < q.Row+q.Rows; row++ {
		pad.Corner(out.Bytes(row), out.Bytes(row), to, from, out.Spec().DType.Size())
	}
}
