// SPDX-License-Identifier: Apache-2.0

package mlp

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// The packed weights of one layer, W[out][in], in the order of memory, in which the kernel
// reads them:
//
//	 block of k 0..blockK-1                        next block of k …
//	┌──────────────┬──────────────┬───┬──────────┬──────────────┬──
//	│ panel 0      │ panel 1      │ … │ panel P-1│ panel 0      │ …
//	└──────────────┴──────────────┴───┴──────────┴──────────────┴──
//	│              │
//	│   one tile:  blockK × nr weights
//	▼
//	 k=0:  W[0][0]  W[1][0]  W[2][0] … W[nr-1][0]     one or two vector loads
//	 k=1:  W[0][1]  W[1][1]  W[2][1] … W[nr-1][1]
//	 …                                                 panel p: outputs p·nr …
//	 k=blockK-1
//
// nr is the kernel's width (16 for AVX2, 4 for plain Go). Outputs are padded with zeros to
// whole panels, inputs to a multiple of unroll, so that no kernel needs a tail; the last
// block of k may be shorter.
//
// A tile (blockK·nr·4 bytes) stays in the first- or second-level cache while every group
// of rows uses it; the inputs of that block (rows·blockK·4) stay in the second. The
// whole layer is one forward stream, so the kernel prefetches the bytes after the tile.
const (
	blockK = 1024
	unroll = 4
)

// layer is one packed nn.Linear.
type layer struct {
	in, out int
	kPad    int       // in, rounded up to unroll
	nPad    int       // out, rounded up to nr; len(bias)
	weights []float32 // kPad·nPad floats, laid out as above
	bias    []float32
	nr      int
}

func roundUp(n, to int) int { return (n + to - 1) / to * to }

// newLayers lays all layers out in one allocation, so that the prefetch at the end of one layer warms up the next.
func newLayers(sizes []int, nr int) []*layer {
	layers := make([]*layer, len(sizes)-1)
	total := 0
	for i := range layers {
		l := &layer{in: sizes[i], out: sizes[i+1], nr: nr}
		l.kPad, l.nPad = roundUp(l.in, unroll), roundUp(l.out, nr)
		l.bias = alignedFloats(l.nPad)
		total += l.kPad * l.nPad
		layers[i] = l
	}
	all := alignedFloats(total)
	adviseHugePages(all)
	for _, l := range layers {
		n := l.kPad * l.nPad
		l.weights, all = all[:n:n], all[n:]
	}
	return layers
}

// adviseHugePages asks for 2 MiB pages before the weights are first touched. It is a hint: without it a stream is a bit slower.
func adviseHugePages(s []float32) {
	const page, worthIt = 4096, 4 << 20
	b := unsafe.Slice((*byte)(unsafe.Pointer(&s[0])), 4*len(s))
	if len(b) < worthIt {
		return
	}
	// Whole pages inside s only: its neighbours on the heap are not ours to advise.
	b = b[(page-uintptr(unsafe.Pointer(&b[0]))%page)%page:]
	_ = unix.Madvise(b[:len(b)/page*page], unix.MADV_HUGEPAGE)
}

// tileAt finds the tile of a panel in the block that starts at k0.
func (l *layer) tileAt(k0, panel int) []float32 {
	kLen := min(blockK, l.kPad-k0)
	at := k0*l.nPad + panel*kLen*l.nr
	return l.weights[at : at+kLen*l.nr]
}

// row undoes the packing for output o.
func (l *layer) row(dst []float32, o int) {
	for k0 := 0; k0 < l.kPad; k0 += blockK {
		tile := l.tileAt(k0, o/l.nr)
		for k := 0; k < min(blockK, l.in-k0); k++ {
			dst[k0+k] = tile[k*l.nr+o%l.nr]
		}
	}
}

// fill packs the layer. The function writes row o of W into the buffer that it gets. Padding is never written: it stays zero.
func (l *layer) fill(write func(row []float32, o int)) {
	row := make([]float32, l.in)
	for o := range l.out {
		write(row, o)
		for k0 := 0; k0 < l.kPad; k0 += blockK {
			tile := l.tileAt(k0, o/l.nr)[o%l.nr:]
			for k, w := range row[k0:min(k0+blockK, l.in)] {
				tile[k*l.nr] = w
			}
		}
	}
}
