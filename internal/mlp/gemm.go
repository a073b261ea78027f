// SPDX-License-Identifier: Apache-2.0

package mlp

import "math"

// One layer for one batch, in the order that reads every weight once:
//
//	for each block of k          the inputs of the block stay in the second-level cache
//	  for each panel             its tile of weights comes from memory, in sequence
//	    for each group of rows   the tile is now near; one micro-kernel call
//
// Sums that are not finished after a block of k rest in the scratch rows.

// streamAhead is how far in front of a single group of rows the weights are
// fetched. Median ms at 2, 4, 8 and 32 KiB, taking turns on a busy machine:
// 7.9, 7.3, 6.9, 8.1 for one row; 10.3, 8.4, 7.5, 9.0 for eight.
const streamAhead = 8192

var negInf = float32(math.Inf(-1))

// job is a layer's work.
type job struct {
	layer *layer
	rows  int
	x     []float32  // inputs, rows·stride
	bias  []*float32 // per row: the layer's bias
	y     []*float32 // per row: scratch for its sums, nPad wide
	dst   []*float32 // per row: where the outputs go, only `out` wide; y for a hidden layer
	relu  bool
}

func (k *kernel) run(t *tile, j *job, stride int) {
	l := j.layer
	groups := (j.rows + k.maxRows() - 1) / k.maxRows()
	t.lda = uintptr(stride) * 4
	for k0 := 0; k0 < l.kPad; k0 += blockK {
		t.k = min(blockK, l.kPad-k0)
		last := k0+blockK >= l.kPad
		t.floor = negInf
		if last && j.relu {
			t.floor = 0
		}
		cin := j.y
		if k0 == 0 {
			cin = j.bias
		}
		for p := range l.nPad / l.nr {
			cout := j.y
			// The last panel may be wider than dst; it takes the way through y.
			if last && (p+1)*l.nr <= l.out {
				cout = j.dst
			}
			t.b = &l.tileAt(k0, p)[0]
			t.off = uintptr(p*l.nr) * 4
			k.groups(t, j, stride, k0, groups, cin, cout)
		}
	}
}

// groups runs all rows over one tile, in groups as equal as possible: 32 rows
// are 11+11+10 rather than 14+14+4, for a small group wastes the FMA units.
func (k *kernel) groups(t *tile, j *job, stride, k0, groups int, cin, cout []*float32) {
	perK := uintptr(k.nr) * 4 // bytes of weights
	t.prefetch, t.step, t.second = streamAhead, perK, 0
	if perK > cacheLine {
		t.second = cacheLine
	}
	if groups > 1 {
		// Each group fetches its share of the tile that comes after this one.
		t.step = (perK + uintptr(groups) - 1) / uintptr(groups)
		t.prefetch, t.second = perK*uintptr(t.k), 0
	}
	r := 0
	for g := range groups {
		n := (j.rows - r) / (groups - g)
		t.a = &j.x[r*stride+k0]
		t.cin, t.cout = &cin[r], &cout[r]
		k.rows[n](t)
		t.prefetch += t.step * uintptr(t.k)
		r += n
	}
}
