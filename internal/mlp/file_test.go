// SPDX-License-Identifier: Apache-2.0

package mlp

import (
	"errors"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"testing"

	"github.com/ringbatch/ringbatch/internal/safetensors"
)

func TestASavedModelComesBackBitForBitWithEveryKernel(t *testing.T) {
	m := newTest(t, []int{37, 530, 41, 3})
	path := filepath.Join(t.TempDir(), "m.safetensors")
	if err := m.Save(path); err != nil {
		t.Fatal(err)
	}
	for _, name := range Kernels() {
		got, err := Load(path, WithKernel(name))
		if err != nil {
			t.Fatal(err)
		}
		same := newTest(t, m.Sizes(), WithKernel(name))
		if !slices.Equal(got.Sizes(), same.Sizes()) {
			t.Fatalf("sizes %v", got.Sizes())
		}
		for i := range got.layers {
			if !slices.Equal(bits(got.layers[i].weights), bits(same.layers[i].weights)) ||
				!slices.Equal(bits(got.layers[i].bias), bits(same.layers[i].bias)) {
				t.Errorf("%s: layer %d differs", name, i)
			}
		}
		src, a, b := randomRows(rand.New(rand.NewPCG(1, 1)), 5, 37), make([]float32, 15), make([]float32, 15)
		got.Forward(a, src, 5)
		same.Forward(b, src, 5)
		if !slices.Equal(bits(a), bits(b)) {
			t.Errorf("%s: outputs differ", name)
		}
	}
}

// testdata/linear.safetensors was written by safetensors 0.8.0 from numpy arrays:
//
//	save_file({'layers.0.weight': np.array([[1,2,3],[4,5,6]], '<f4') / 4, 'layers.0.bias': np.array([.5,-20], '<f4'),
//	           'layers.1.weight': np.array([[2,3]], '<f4'), 'layers.1.bias': np.array([-1], '<f4')}, 'linear.safetensors')
func TestAFileFromNumpyComputesWhatNumpyWould(t *testing.T) {
	for _, name := range Kernels() {
		m, err := Load("testdata/linear.safetensors", WithKernel(name))
		if err != nil {
			t.Fatal(err)
		}
		dst := make([]float32, 2)
		m.Forward(dst, []float32{1, 2, 3, 4, 8, 12}, 2)
		// Row 0: relu(3.5+0.5, 8-20) = (4, 0) → 7. Row 1: relu(14+0.5, 32-20) = (14.5, 12) → 64.
		if !slices.Equal(dst, []float32{7, 64}) {
			t.Errorf("%s: %v", name, dst)
		}
	}
}

func TestFilesThatAreNoModelAreRefused(t *testing.T) {
	tensor := func(name, dtype string, shape ...int) safetensors.Tensor {
		size := map[string]int{"f32": 4, "f16": 2}[dtype]
		for _, d := range shape {
			size *= d
		}
		return safetensors.Tensor{Name: name, DType: dtype, Shape: shape, Data: make([]byte, size)}
	}
	w0, b0 := tensor("layers.0.weight", "f32", 4, 3), tensor("layers.0.bias", "f32", 4)
	for what, tensors := range map[string][]safetensors.Tensor{
		"nothing":       {},
		"no bias":       {w0},
		"no weight":     {b0, tensor("x", "f32", 1)},
		"stranger":      {w0, b0, tensor("x", "f32", 1)},
		"gap":           {w0, b0, tensor("layers.2.weight", "f32", 1, 4), tensor("layers.2.bias", "f32", 1)},
		"half floats":   {tensor("layers.0.weight", "f16", 4, 3), b0},
		"flat weight":   {tensor("layers.0.weight", "f32", 12), b0},
		"bias length":   {w0, tensor("layers.0.bias", "f32", 3)},
		"chain":         {w0, b0, tensor("layers.1.weight", "f32", 1, 5), tensor("layers.1.bias", "f32", 1)},
		"zero width":    {tensor("layers.0.weight", "f32", 0, 3), tensor("layers.0.bias", "f32", 0)},
		"infinite zero": {tensor("layers.0.weight", "f32", 0, 1<<30), tensor("layers.0.bias", "f32", 0)},
	} {
		path := filepath.Join(t.TempDir(), "m.safetensors")
		if err := safetensors.Save(path, tensors, nil); err != nil {
			t.Fatal(err)
		}
		if _, err := Load(path); !errors.Is(err, ErrModelFile) && !errors.Is(err, ErrConfig) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if _, err := Load(filepath.Join(t.TempDir(), "none")); err == nil {
		t.Error("a missing file was loaded")
	}
}
