// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/worker"
	"github.com/ringbatch/ringbatch/worker/cpu"
)

// modelJob is the model of a process.
type modelJob struct {
	Type  string
	Path  string
	DType string
	Shape []int
	Seed  int64
	Fixed time.Duration // simulated
	Item  time.Duration // simulated
}

// openModel is a model inside a process.
type openModel struct {
	Signature tensor.Signature
	Run       worker.Func                 // on a batch of the ring
	Alone     func(rows int) (run func()) // on private memory, without ringbatch
	Serve     serveFunc                   // instead of Run; see gpu_role.go
}

// modelKind is a value of --model_type.
type modelKind struct {
	takesPath bool
	dtypes    []string
	check     func(modelJob) error // refuses a model without loading it
	open      func(modelJob) (*openModel, error)
	note      func(modelJob) string // a remark in every output; nil or "" for none
}

// modelKinds lists them all.
func modelKinds() map[string]modelKind {
	numbers := []string{"f32", "f64", "i32", "i64"}
	return map[string]modelKind{
		"torch": { // a file or import path (--model_path), by PyTorch, on a GPU if there is one; float16 is computed channels last
			dtypes: []string{"f32", "f16"}, takesPath: true, check: checkTorch, open: openTorch,
		},
		"echo": { // gives its input back
			dtypes: []string{"bool", "u8", "i8", "i16", "i32", "i64", "f16", "bf16", "f32", "f64"},
			check:  checkShape, open: openCPU,
		},
		"affine": { // y = 2·x + 1
			dtypes: numbers, check: checkShape, open: openCPU,
		},
		"mlp": { // a perceptron with 96 MiB of weights
			dtypes: []string{"f32"}, check: func(modelJob) error { return nil }, open: openCPU,
		},
		"simulated": { // computes nothing: sleeps --simulated_fixed per batch and --simulated_item per row
			dtypes: []string{"u8", "i32", "f16", "f32"},
			check:  checkShape, open: openCPU, note: simulatedNote,
		},
	}
}

func kindNames() string { return strings.Join(slices.Sorted(maps.Keys(modelKinds())), ", ") }

func openCPU(j modelJob) (*openModel, error) {
	o := cpu.Options{Scale: 2, Offset: 1, Seed: j.Seed, FixedCost: j.Fixed, ItemCost: j.Item}
	if j.Type != "mlp" {
		spec, err := j.input()
		if err != nil {
			return nil, err
		}
		o.Inputs = []tensor.Spec{spec}
	}
	m, err := cpu.New(j.Type, o)
	if err != nil {
		return nil, err
	}
	return &openModel{Signature: m.Signature, Run: m.Run, Alone: m.Alone}, nil
}

func (j *modelJob) input() (tensor.Spec, error) {
	d, err := tensor.ParseDType(j.DType)
	return tensor.Spec{Name: "x", DType: d, Shape: j.Shape}, err
}

// checkShape is for models whose output is like their input.
func checkShape(j modelJob) error {
	spec, err := j.input()
	if err != nil {
		return err
	}
	sig := tensor.Signature{Inputs: []tensor.Spec{spec}, Outputs: []tensor.Spec{spec}}
	return sig.Validate()
}

func simulatedNote(j modelJob) string {
	return fmt.Sprintf("simulated: sleeps %v per batch and %v per row, computes nothing", j.Fixed, j.Item)
}
