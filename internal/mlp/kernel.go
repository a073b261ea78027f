// SPDX-License-Identifier: Apache-2.0

package mlp

import (
	"math"
	"unsafe"
)

// tile is one call of a micro-kernel: a group of rows times one tile of weights. The assembly reads it by field name
// (go_asm.h), in bytes.
//
//	cout[r][off+j] = max(floor, cin[r][off+j] + Σk a[r·lda+k] · b[k·nr+j])
type tile struct {
	a    *float32  // first input of the first row
	lda  uintptr   // bytes from one row to the next
	b    *float32  // the tile of weights
	k    int       // inputs in this block; a multiple of unroll, never 0
	cin  **float32 // per row: where its sums come from (the bias, or the block before)
	cout **float32 // per row: where they go
	off  uintptr   // bytes from those pointers to this panel's columns

	prefetch uintptr // bytes from b to the next weights to fetch; may lie past the end
	step     uintptr // bytes to move that on per k
	floor    float32 // 0 after the last block of a ReLU layer, otherwise -Inf
}

// kernel is a family of micro-kernels, one per row count.
type kernel struct {
	name string
	nr   int           // columns
	rows []func(*tile) // rows[n] does n rows; rows[0] is nil
}

// streamAhead is the prefetch distance of a single group of rows, in bytes. 2, 4 and 32 KiB were measured to be slower.
const streamAhead = 8192

// runLayer computes one layer for one batch, in the order that reads every weight once:
//
//	for each block of k          the inputs of the block stay in the second-level cache
//	  for each panel             its tile of weights comes from memory, in sequence
//	    for each group of rows   the tile is now near; one micro-kernel call
//
// Sums that are not finished after a block of k rest in y.
func (k *kernel) runLayer(t *tile, l *layer, rows int, x []float32, stride int, bias, y []*float32, relu bool) {
	t.lda = uintptr(stride) * 4
	most := len(k.rows) - 1
	groups := (rows + most - 1) / most
	for k0 := 0; k0 < l.kPad; k0 += blockK {
		t.k = min(blockK, l.kPad-k0)
		t.floor = float32(math.Inf(-1))
		if relu && k0+blockK >= l.kPad {
			t.floor = 0
		}
		cin := y
		if k0 == 0 {
			cin = bias
		}
		for p := range l.nPad / l.nr {
			t.b = &l.tileAt(k0, p)[0]
			t.off = uintptr(p*l.nr) * 4
			t.prefetch, t.step = streamAhead, uintptr(k.nr)*4
			if groups > 1 { // each group fetches its share of the next tile
				t.prefetch, t.step = t.step*uintptr(t.k), (t.step+uintptr(groups)-1)/uintptr(groups)
			}
			for r, g := 0, 0; g < groups; g++ {
				n := (rows - r) / (groups - g) // groups as equal as possible: a small one wastes the FMA units
				t.a, t.cin, t.cout = &x[r*stride+k0], &cin[r], &y[r]
				k.rows[n](t)
				t.prefetch += t.step * uintptr(t.k)
				r += n
			}
		}
	}
}

const cacheLine = 64

// alignedFloats starts on a cache line, so that a vector load never touches two.
func alignedFloats(n int) []float32 {
	s := make([]float32, n+cacheLine/4)
	skip := 0
	if rest := uintptr(unsafe.Pointer(&s[0])) % cacheLine; rest != 0 {
		skip = int(cacheLine-rest) / 4
	}
	return s[skip : skip+n : skip+n]
}

// inputs, weights and sums are a tile's pointers as slices, for the portable kernel.
func (t *tile) inputs(row int) []float32 {
	p := unsafe.Add(unsafe.Pointer(t.a), uintptr(row)*t.lda)
	return unsafe.Slice((*float32)(p), t.k)
}

func (t *tile) weights(nr int) []float32 { return unsafe.Slice(t.b, t.k*nr) }

func (t *tile) sums(table **float32, row, nr int) []float32 {
	p := unsafe.Slice(table, row+1)[row]
	return unsafe.Slice((*float32)(unsafe.Add(unsafe.Pointer(p), t.off)), nr)
}
