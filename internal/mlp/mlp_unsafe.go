// SPDX-License-Identifier: Apache-2.0

package mlp

import "unsafe"

const cacheLine = 64

// alignedFloats starts on a cache line, so that a vector load never touches two.
func alignedFloats(n int) []float32 {
	const spare = cacheLine / 4
	s := make([]float32, n+spare)
	skip := 0
	if rest := uintptr(unsafe.Pointer(&s[0])) % cacheLine; rest != 0 {
		skip = int(cacheLine-rest) / 4
	}
	return s[skip : skip+n : skip+n]
}

// floatBytes is the memory of s as bytes.
func floatBytes(s []float32) []byte {
	if len(s) == 0 {
		return nil
	}
	return unsafe.Slice((*byte)(unsafe.Pointer(&s[0])), 4*len(s))
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

// pageOffset is how far the first whole page of b is from its start.
func pageOffset(b []byte, page int) int {
	rest := int(uintptr(unsafe.Pointer(&b[0])) % uintptr(page))
	if rest == 0 {
		return 0
	}
	return page - rest
}
