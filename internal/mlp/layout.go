// SPDX-License-Identifier: Apache-2.0

package mlp

// The packed weights of one layer, W[out][in], as they lie in memory and in the
// order in which they are read:
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
// nr is the kernel's width (32 for AVX-512, 16 for AVX2, 4 for plain Go). Outputs
// are padded with zeros to whole panels, inputs to a multiple of unroll, so no
// kernel needs a tail; the last block of k may be shorter.
//
// A tile (blockK·nr·4 bytes) stays in the first- or second-level cache while every
// group of rows passes over it; the inputs of that block (rows·blockK·4) stay in
// the second. The whole layer is one forward stream, whatever the row count,
// so the tile after this one is simply what follows it: that is what is prefetched.
const (
	blockK = 1024
	unroll = 4
)

// layer is one packed nn.Linear, shared by all clones and never written after load.
type layer struct {
	in, out int
	kPad    int       // in, rounded up to unroll
	nPad    int       // out, rounded up to nr; len(bias)
	weights []float32 // kPad·nPad floats, laid out as above
	bias    []float32
	nr      int
}

func roundUp(n, to int) int { return (n + to - 1) / to * to }

// newLayers lays all layers out in one allocation, so that the prefetch at the
// end of one layer warms up the next.
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

// tileAt finds the tile of a panel in the block that starts at k0.
func (l *layer) tileAt(k0, panel int) []float32 {
	kLen := min(blockK, l.kPad-k0)
	at := k0*l.nPad + panel*kLen*l.nr
	return l.weights[at : at+kLen*l.nr]
}

// packPanel writes nr rows of W (fewer in the last panel), each l.in long, into
// their tiles. The padding is never written: it is zero from the allocation.
func (l *layer) packPanel(panel int, rows [][]float32) {
	for k0 := 0; k0 < l.kPad; k0 += blockK {
		tile := l.tileAt(k0, panel)
		kLen := min(blockK, l.in-k0)
		for j, row := range rows {
			src := row[k0 : k0+kLen]
			dst := tile[j:]
			for k, w := range src {
				dst[k*l.nr] = w
			}
		}
	}
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

// fill packs the layer from a function that gives one row of W at a time, in a
// buffer of its own or in the scratch it is handed.
func (l *layer) fill(row func(scratch []float32, o int) []float32) {
	buf := make([]float32, l.nr*l.in)
	rows := make([][]float32, l.nr)
	for o := 0; o < l.out; o += l.nr {
		n := min(l.nr, l.out-o)
		for j := range n {
			rows[j] = row(buf[j*l.in:(j+1)*l.in], o+j)
		}
		l.packPanel(o/l.nr, rows[:n])
	}
}
