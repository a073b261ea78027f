// SPDX-License-Identifier: Apache-2.0

package mlp

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
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

// Load reads a model. Nothing is allocated for it before all shapes are checked
// against one another and against the size of the file.
func Load(path string, opts ...Option) (*MLP, error) {
	f, err := safetensors.Open(path)
	if err != nil {
		return nil, fmt.Errorf("load model: %w", err)
	}
	defer f.Close()
	m, err := load(f, opts)
	if err != nil {
		return nil, fmt.Errorf("load model %s: %w", path, err)
	}
	return m, nil
}

func load(f *safetensors.File, opts []Option) (*MLP, error) {
	sizes, err := sizesOf(f)
	if err != nil {
		return nil, err
	}
	m, err := build(sizes, opts)
	if err != nil {
		return nil, err
	}
	for i, l := range m.layers {
		if err := l.load(f, i); err != nil {
			return nil, err
		}
	}
	return m, nil
}

// sizesOf derives the shape from the tensors, and refuses a file with one too
// many: to ignore it would be to run another model than the file's.
func sizesOf(f *safetensors.File) ([]int, error) {
	all := f.Tensors()
	if len(all) == 0 || len(all)%2 != 0 {
		return nil, fmt.Errorf("%w: %d tensors, need a weight and a bias per layer", ErrModelFile, len(all))
	}
	var sizes []int
	for i := range len(all) / 2 {
		w, err := f.Info(weightName(i))
		if err != nil {
			return nil, fmt.Errorf("%w: %w", ErrModelFile, err)
		}
		b, err := f.Info(biasName(i))
		if err != nil {
			return nil, fmt.Errorf("%w: %w", ErrModelFile, err)
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
	b, err := f.Reader(biasName(i))
	if err != nil {
		return err
	}
	if err := readFloats(b, make([]byte, 4*l.out), l.bias[:l.out]); err != nil {
		return fmt.Errorf("%s: %w", biasName(i), err)
	}
	section, err := f.Reader(weightName(i))
	if err != nil {
		return err
	}
	r, buf := bufio.NewReaderSize(section, 1<<20), make([]byte, 4*l.in)
	var failed error
	l.fill(func(row []float32, _ int) []float32 {
		if failed == nil {
			failed = readFloats(r, buf, row)
		}
		return row
	})
	if failed != nil {
		return fmt.Errorf("%s: %w", weightName(i), failed)
	}
	return nil
}

func readFloats(r io.Reader, buf []byte, dst []float32) error {
	if _, err := io.ReadFull(r, buf); err != nil {
		return err
	}
	for i := range dst {
		dst[i] = math.Float32frombits(binary.LittleEndian.Uint32(buf[4*i:]))
	}
	return nil
}
