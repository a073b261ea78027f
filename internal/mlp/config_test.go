// SPDX-License-Identifier: Apache-2.0

package mlp

import (
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/ringbatch/ringbatch/internal/must"
)

func TestImpossibleShapesAreRefused(t *testing.T) {
	for _, sizes := range [][]int{nil, {5}, {0, 5}, {5, -1}, {5, maxWidth + 1}, {math.MaxInt, math.MaxInt}, {maxWidth, maxWidth}} {
		if _, err := New(Config{Sizes: sizes}); !errors.Is(err, ErrConfig) {
			t.Errorf("sizes %v: %v", sizes, err)
		}
	}
}

func TestShortBuffersPanicBeforeAnythingIsWritten(t *testing.T) {
	m := newTest(t, bestKernel(), 4, 4)
	dst := make([]float32, 8)
	for name, call := range map[string]func(){
		"short src":     func() { m.Forward(dst, make([]float32, 7), 2) },
		"short dst":     func() { m.Forward(dst[:7], make([]float32, 8), 2) },
		"negative rows": func() { m.Forward(dst, dst, -1) },
		"row counts":    func() { m.ForwardRows([][]float32{dst[:4]}, nil) },
		"short row":     func() { m.ForwardRows([][]float32{dst[:4], dst[4:7]}, [][]float32{{1, 2, 3, 4}, {1, 2, 3, 4}}) },
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s: no panic", name)
				}
			}()
			call()
		}()
	}
	if slices.ContainsFunc(dst, func(v float32) bool { return v != 0 }) {
		t.Error("something was written")
	}
}

func TestNoRowsIsNoWork(t *testing.T) {
	m := newTest(t, bestKernel(), 4, 4)
	m.Forward(nil, nil, 0)
	m.ForwardRows(nil, nil)
}

func TestASeedGivesTheSameWeightsWithEveryKernel(t *testing.T) {
	sizes := []int{600, 50, 7}
	first := newTest(t, bestKernel(), sizes...)
	for name, k := range kernels() {
		m := newTest(t, k, sizes...)
		for i, l := range m.layers {
			a, b := make([]float32, l.in), make([]float32, l.in)
			for o := range l.out {
				l.row(a, o)
				first.layers[i].row(b, o)
				if !slices.Equal(a, b) || l.bias[o] != first.layers[i].bias[o] {
					t.Fatalf("%s: layer %d row %d differs", name, i, o)
				}
			}
		}
	}
	other, err := New(Config{Sizes: sizes, Seed: 8})
	must.Do(t, err)
	if slices.Equal(other.layers[0].weights, first.layers[0].weights) {
		t.Error("another seed gives the same weights")
	}
}

func TestSeededWeightsNeverChangeBetweenReleases(t *testing.T) {
	m := newTest(t, bestKernel(), 3, 2, 2)
	var got []float32
	for _, l := range m.layers {
		w := make([]float32, l.in)
		l.row(w, 1)
		got = append(append(got, w...), l.bias[1])
	}
	want := []float32{-0.0883698, -0.8817642, 0.6002406, 0.029494274, 1.0905203, -1.1484295, 0.031085575}
	if !slices.Equal(got, want) {
		t.Errorf("got %#v, want %#v", got, want)
	}
}

func TestActivationsNeitherExplodeNorVanish(t *testing.T) {
	sizes := []int{256, 512, 512, 512, 512, 512, 512, 512, 512, 256}
	m := newTest(t, bestKernel(), sizes...)
	src := randomRows(rand.New(rand.NewPCG(9, 1)), 16, m.In())
	dst := make([]float32, 16*m.Out())
	m.Forward(dst, src, 16)
	sum := 0.0
	for _, v := range dst {
		sum += float64(v) * float64(v)
	}
	if rms := math.Sqrt(sum / float64(len(dst))); rms < 0.5 || rms > 3 {
		t.Errorf("after %d layers the root mean square is %g, of 1 at the start", len(sizes)-1, rms)
	}
}
