// SPDX-License-Identifier: Apache-2.0

package mlp

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/ringbatch/ringbatch/internal/must"
)

// fileTensor is a tensor as a file has it.
type fileTensor struct {
	name, dtype string
	shape       []int
	data        []byte
}

func writeFile(t *testing.T, tensors ...fileTensor) (path string) {
	t.Helper()
	type entry struct {
		DType   string `json:"dtype"`
		Shape   []int  `json:"shape"`
		Offsets [2]int `json:"data_offsets"`
	}
	header, data := map[string]entry{}, []byte(nil)
	for _, x := range tensors {
		header[x.name] = entry{x.dtype, x.shape, [2]int{len(data), len(data) + len(x.data)}}
		data = append(data, x.data...)
	}
	text, err := json.Marshal(header)
	must.Do(t, err)
	path = filepath.Join(t.TempDir(), "m.safetensors")
	must.Do(t, os.WriteFile(path, slices.Concat(binary.LittleEndian.AppendUint64(nil, uint64(len(text))), text, data), 0o600))
	return path
}

func floats(t *testing.T, s []float32) []byte {
	t.Helper()
	var b bytes.Buffer
	must.Do(t, binary.Write(&b, binary.LittleEndian, s))
	return b.Bytes()
}

func TestAModelInAFileIsLoadedBitForBitWithEveryKernel(t *testing.T) {
	m := newTest(t, bestKernel(), 37, 530, 41, 3)
	var tensors []fileTensor
	for i := range m.Layers() {
		w, bias := m.Weights(i)
		tensors = append(tensors,
			fileTensor{weightName(i), "F32", []int{m.sizes[i+1], m.sizes[i]}, floats(t, w)},
			fileTensor{biasName(i), "F32", []int{m.sizes[i+1]}, floats(t, bias)})
	}
	path := writeFile(t, tensors...)
	for name, k := range kernels() {
		got, err := loadOn(k, path)
		must.Do(t, err)
		same := newTest(t, k, m.sizes...)
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
	for name, k := range kernels() {
		m, err := loadOn(k, "testdata/linear.safetensors")
		must.Do(t, err)
		dst := make([]float32, 2)
		m.Forward(dst, []float32{1, 2, 3, 4, 8, 12}, 2)
		// Row 0: relu(3.5+0.5, 8-20) = (4, 0) → 7. Row 1: relu(14+0.5, 32-20) = (14.5, 12) → 64.
		if !slices.Equal(dst, []float32{7, 64}) {
			t.Errorf("%s: %v", name, dst)
		}
	}
}

func TestFilesThatAreNoModelAreRefused(t *testing.T) {
	tensor := func(name, dtype string, shape ...int) fileTensor {
		size := map[string]int{"F32": 4, "F16": 2}[dtype]
		for _, d := range shape {
			size *= d
		}
		return fileTensor{name, dtype, shape, make([]byte, size)}
	}
	w0, b0 := tensor("layers.0.weight", "F32", 4, 3), tensor("layers.0.bias", "F32", 4)
	for what, tensors := range map[string][]fileTensor{
		"nothing":       {},
		"no bias":       {w0},
		"no weight":     {b0, tensor("x", "F32", 1)},
		"stranger":      {w0, b0, tensor("x", "F32", 1)},
		"gap":           {w0, b0, tensor("layers.2.weight", "F32", 1, 4), tensor("layers.2.bias", "F32", 1)},
		"half floats":   {tensor("layers.0.weight", "F16", 4, 3), b0},
		"flat weight":   {tensor("layers.0.weight", "F32", 12), b0},
		"bias length":   {w0, tensor("layers.0.bias", "F32", 3)},
		"chain":         {w0, b0, tensor("layers.1.weight", "F32", 1, 5), tensor("layers.1.bias", "F32", 1)},
		"zero width":    {tensor("layers.0.weight", "F32", 0, 3), tensor("layers.0.bias", "F32", 0)},
		"infinite zero": {tensor("layers.0.weight", "F32", 0, 1<<30), tensor("layers.0.bias", "F32", 0)},
	} {
		if _, err := Load(writeFile(t, tensors...)); !errors.Is(err, ErrModelFile) && !errors.Is(err, ErrConfig) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if _, err := Load(filepath.Join(t.TempDir(), "none")); err == nil {
		t.Error("a missing file was loaded")
	}
}
