// SPDX-License-Identifier: Apache-2.0

package mlp

import (
	"errors"
	"math"
	"slices"
	"testing"
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

func TestSeededWeightsNeverChange(t *testing.T) {
	want := []float32{-0.0883698, -0.8817642, 0.6002406, 0.029494274, 1.0905203, -1.1484295, 0.031085575}
	for name, k := range kernels() {
		var got []float32
		for _, l := range newTest(t, k, 3, 2, 2).layers {
			w := make([]float32, l.in)
			l.row(w, 1)
			got = append(append(got, w...), l.bias[1])
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s: got %#v, want %#v", name, got, want)
		}
	}
}
