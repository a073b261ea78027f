// SPDX-License-Identifier: Apache-2.0

package mlp

import (
	"archive/zip"
	"encoding/binary"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/ringbatch/ringbatch/internal/npy"
)

// Load makes a model from an .npz file of numpy.savez: for each layer the arrays "0.weight" [out, in] and "0.bias" [out],
// under any name before the dot, as the state dict of torch's nn.Linear layers has them. The numbers in the names order the
// layers, and the file orders layers without.
func Load(file string) (*MLP, error) { return loadOn(bestKernel(), file) }

func loadOn(k *kernel, file string) (m *MLP, err error) {
	defer func() {
		if err != nil {
			m, err = nil, fmt.Errorf("weights %s: %w", file, err)
		}
	}()
	z, err := zip.OpenReader(file)
	if err == zip.ErrFormat {
		return nil, fmt.Errorf("%w: no .npz file; write it with numpy.savez", ErrConfig)
	}
	if err != nil {
		return nil, err
	}
	defer z.Close()
	var sizes []int
	var arrays [][]float32
	left := int64(maxWeightBytes)
	slices.SortStableFunc(z.File, func(a, b *zip.File) int { return slices.Compare(numbers(a.Name), numbers(b.Name)) })
	for i := 0; i+1 < len(z.File); i += 2 {
		if strings.HasSuffix(z.File[i].Name, ".bias.npy") {
			z.File[i], z.File[i+1] = z.File[i+1], z.File[i]
		}
	}
	for i, f := range z.File {
		kind, rank := ".weight", 2
		if i%2 == 1 {
			kind, rank = strings.TrimSuffix(strings.TrimSuffix(z.File[i-1].Name, ".npy"), "weight")+"bias", 1
		}
		name := strings.TrimSuffix(f.Name, ".npy")
		a, err := open(f, left)
		left -= int64(len(a.Data))
		switch {
		case !strings.HasSuffix(name, kind) || rank == 1 && name != kind:
			return nil, fmt.Errorf("%w: array %d is %q, want %q (weights and biases of the layers, in turns)", ErrConfig, i, name, kind)
		case err != nil:
			return nil, fmt.Errorf("%s: %w", name, err)
		case rank == 2 && i > 0 && !inOrder(z.File[i-2].Name, f.Name):
			return nil, fmt.Errorf("%w: the names do not say whether %s follows %s: number the layers, as in 0.weight, 1.weight", ErrConfig,
				name, strings.TrimSuffix(z.File[i-2].Name, ".npy"))
		case a.DType != "f32":
			return nil, fmt.Errorf("%w: %s is %s, want float32: save w.astype('float32')", ErrConfig, name, a.DType)
		case len(a.Shape) != rank:
			return nil, fmt.Errorf("%w: %s has shape %v, want %s", ErrConfig, name, a.Shape, []string{"", "[out]", "[out, in]"}[rank])
		case i == 0:
			sizes = []int{a.Shape[1], a.Shape[0]}
		case rank == 2 && a.Shape[1] != sizes[len(sizes)-1]:
			return nil, fmt.Errorf("%w: %s has shape %v, but the layer before has %d outputs", ErrConfig, name, a.Shape, sizes[len(sizes)-1])
		case rank == 2:
			sizes = append(sizes, a.Shape[0])
		case a.Shape[0] != sizes[len(sizes)-1]:
			return nil, fmt.Errorf("%w: %s has shape %v, want [%d]", ErrConfig, name, a.Shape, sizes[len(sizes)-1])
		}
		values := floats(a.Data)
		if slices.ContainsFunc(values, func(x float32) bool { return x-x != 0 }) {
			return nil, fmt.Errorf("%w: %s has numbers that are not finite", ErrConfig, name)
		}
		arrays = append(arrays, values)
	}
	if len(arrays) == 0 || len(arrays)%2 == 1 {
		return nil, fmt.Errorf("%w: %d arrays, want a weight and a bias for each layer", ErrConfig, len(arrays))
	}
	if m, err = build(k, sizes); err != nil {
		return nil, err
	}
	for i, l := range m.layers {
		l.fill(func(row []float32, o int) { copy(row, arrays[2*i][o*l.in:]) })
		copy(l.bias, arrays[2*i+1])
	}
	return m, nil
}

func open(f *zip.File, limit int64) (npy.Array, error) {
	r, err := f.Open()
	if err != nil {
		return npy.Array{}, err
	}
	defer r.Close()
	a, err := npy.Read(r, limit)
	if err != nil {
		return a, err
	}
	switch n, err := r.Read(make([]byte, 1)); { // the checksum is compared at the end
	case n > 0:
		return a, fmt.Errorf("%w: bytes follow the array", ErrConfig)
	case err != io.EOF:
		return a, err
	}
	return a, nil
}

// inOrder says that layer b follows a: their names differ in numbers alone, or have none.
func inOrder(a, b string) bool {
	letters := func(r rune) rune {
		if r >= '0' && r <= '9' {
			return -1
		}
		return r
	}
	x, y := numbers(a), numbers(b)
	return len(x)+len(y) == 0 || slices.Compare(x, y) < 0 && strings.Map(letters, a) == strings.Map(letters, b)
}

// numbers are those in a name.
func numbers(name string) (found []int) {
	for _, digits := range strings.FieldsFunc(name, func(r rune) bool { return r < '0' || r > '9' }) {
		n, _ := strconv.Atoi(digits)
		found = append(found, n)
	}
	return found
}

func floats(data []byte) []float32 {
	x := make([]float32, len(data)/4)
	for i := range x {
		x[i] = math.Float32frombits(binary.LittleEndian.Uint32(data[4*i:]))
	}
	return x
}
