// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/ringbatch/ringbatch/internal/mlp"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/worker"
	"github.com/ringbatch/ringbatch/worker/cpu"
)

// modelJob says which model a process runs. It travels to that process.
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
	Alone     func(rows int) (run func()) // on private memory, nothing around it

	// Serve is for models with a loop of their own, instead of Run; see
	// gpu_role.go.
	Serve serveFunc
}

// modelKind is what --model_type chooses.
type modelKind struct {
	takesPath bool
	dtypes    []string
	// size tells, without loading anything, what a row takes in the ring and
	// what one copy of the model takes; row 0 if only the file knows.
	size func(modelJob) (row, model int64, err error)
	open func(modelJob) (*openModel, error)
	note func(modelJob) string // to be said in every output; nil or "" for none
}

// modelKinds lists them all.
func modelKinds() map[string]modelKind {
	numbers := []string{"f32", "f64", "i32", "i64"}
	return map[string]modelKind{
		"torch": { // a file or import path (--model_path), by PyTorch, on a GPU if there is one; float16 is computed channels last
			dtypes: []string{"f32", "f16"}, takesPath: true, size: torchSize, open: openTorch,
		},
		"echo": { // gives its input back
			dtypes: []string{"bool", "u8", "i8", "i16", "i32", "i64", "f16", "bf16", "f32", "f64"},
			size:   shapedSize, open: openCPU,
		},
		"affine": { // y = 2·x + 1
			dtypes: numbers, size: shapedSize, open: openCPU,
		},
		"mlp": { // a perceptron with 96 MiB of weights, or one from --model_path (safetensors)
			dtypes:    []string{"f32"},
			takesPath: true, size: mlpSize, open: openCPU,
		},
		"simulated": { // computes nothing: sleeps --simulated_fixed per batch and --simulated_item per row
			dtypes: []string{"u8", "i32", "f16", "f32"},
			size:   shapedSize, open: openCPU, note: simulatedNote,
		},
	}
}

func kindNames() string { return strings.Join(slices.Sorted(maps.Keys(modelKinds())), ", ") }

func openCPU(j modelJob) (*openModel, error) {
	o := cpu.Options{Scale: 2, Offset: 1, ModelPath: j.Path, Seed: j.Seed, FixedCost: j.Fixed, ItemCost: j.Item}
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

// shapedSize is for models whose output is like their input.
func shapedSize(j modelJob) (row, model int64, err error) {
	spec, err := j.input()
	if err != nil {
		return 0, 0, err
	}
	sig := tensor.Signature{Inputs: []tensor.Spec{spec}, Outputs: []tensor.Spec{spec}}
	if err := sig.Validate(); err != nil {
		return 0, 0, err
	}
	return 2 * int64(spec.RowBytes()), 0, nil
}

func mlpSize(j modelJob) (row, model int64, err error) {
	if j.Path != "" {
		st, err := os.Stat(j.Path)
		if err != nil {
			return 0, 0, err
		}
		return 0, st.Size(), nil
	}
	cfg := mlp.Default()
	return 4 * int64(cfg.Sizes[0]+cfg.Sizes[len(cfg.Sizes)-1]), cfg.WeightBytes(), nil
}

func simulatedNote(j modelJob) string {
	return fmt.Sprintf("simulated: sleeps %v per batch and %v per row, computes nothing", j.Fixed, j.Item)
}
