// SPDX-License-Identifier: Apache-2.0

package mlp

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"github.com/ringbatch/ringbatch/internal/safetensors"
)

// ErrModelFile is wrapped by every refusal of a file that is valid safetensors
// but not a model of this package.
var ErrModelFile = errors.New("not a perceptron")

// A model file holds, as torch's nn.Linear names and shapes them,
//
//	layers.0.weight [out, in]   layers.0.bias [out]   layers.1.weight …
//
// all f32, and nothing else.
func weightName(i int) string { return fmt.Sprintf("layers.%d.weight", i) }
func biasName(i int) string   { return fmt.Sprintf("layers.%d.bias", i) }

// Load reads a model. It allocates nothing before all shapes are checked against one another and against the size of the file.
func Load(path string) (*MLP, error) {
	m, err := loadOn(bestKernel(), path)
	if err != nil {
		return nil, fmt.Errorf("load model %s: %w", path, err)
	}
	return m, nil
}

func loadOn(k *kernel, path string) (*MLP, error) {
	f, err := safetensors.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	sizes, err := sizesOf(f)
	if err != nil {
		return nil, err
	}
	m, err := build(k, sizes)
	if err != nil {
		return nil, err
	}
	for i, l := range m.layers {
		if err := l.load(f, i); err != nil {
			return nil, fmt.Errorf("layer %d: %w", i, err)
		}
	}
	return m, nil
}

// sizesOf derives the shape from the tensors, and refuses a file with one too
// many: to ignore it would be to run another model than the file's.
func sizesOf(f *safetensors.File) ([]int, error) {
	n := len(f.Tensors)
	if n == 0 || n%2 != 0 {
		return nil, fmt.Errorf("%w: %d tensors, need a weight and a bias per layer", ErrModelFile, n)
	}
	var sizes []int
	for i := range n / 2 {
		w, wOK := f.Tensors[weightName(i)]
		b, bOK := f.Tensors[biasName(i)]
		if !wOK || !bOK {
			return nil, fmt.Errorf("%w: %d tensors, and no weight or no bias of layer %d", ErrModelFile, n, i)
		}
		if w.DType != "f32" || b.DType != "f32" {
			return nil, fmt.Errorf("%w: layer %d is %s and %s, only f32 is supported", ErrModelFile, i, w.DType, b.DType)
		}
		if len(w.Shape) != 2 || !slices.Equal(b.Shape, w.Shape[:1]) {
			return nil, fmt.Errorf("%w: layer %d has weight %v and bias %v", ErrModelFile, i, w.Shape, b.Shape)
		}
		if i == 0 {
			sizes = append(sizes, w.Shape[1])
		}
		if in := sizes[len(sizes)-1]; w.Shape[1] != in {
			return nil, fmt.Errorf("%w: layer %d takes %d inputs, the one before gives %d", ErrModelFile, i, w.Shape[1], in)
		}
		sizes = append(sizes, w.Shape[0])
	}
	return sizes, nil
}

func (l *layer) load(f *safetensors.File, i int) error {
	err := binary.Read(f.Reader(biasName(i)), binary.LittleEndian, l.bias[:l.out])
	r := bufio.NewReaderSize(f.Reader(weightName(i)), 1<<20)
	l.fill(func(row []float32, _ int) {
		if err == nil {
			err = binary.Read(r, binary.LittleEndian, row)
		}
	})
	return err
}
