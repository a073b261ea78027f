// SPDX-License-Identifier: Apache-2.0

package mlp

// The portable kernel: 4 columns, 1 or 2 rows. Eight sums, four weights, an input and a
// product fit into 16 registers; 4 by 4 spills and was measured to be slower. The sums
// are separate variables, since the compiler keeps no array in registers. The order of k
// is that of the vector kernel.

const portableNR = 4

func portable() *kernel {
	return &kernel{name: "portable", nr: portableNR, rows: []func(*tile){nil, portable1, portable2}}
}

func portable1(t *tile) {
	c := (*[portableNR]float32)(t.sums(t.cin, 0, portableNR))
	c0, c1, c2, c3 := c[0], c[1], c[2], c[3]
	b := t.weights(portableNR)
	for _, x := range t.inputs(0) {
		w := (*[portableNR]float32)(b)
		c0 += x * w[0]
		c1 += x * w[1]
		c2 += x * w[2]
		c3 += x * w[3]
		b = b[portableNR:]
	}
	t.put(0, c0, c1, c2, c3)
}

func portable2(t *tile) {
	c := (*[portableNR]float32)(t.sums(t.cin, 0, portableNR))
	c0, c1, c2, c3 := c[0], c[1], c[2], c[3]
	c = (*[portableNR]float32)(t.sums(t.cin, 1, portableNR))
	d0, d1, d2, d3 := c[0], c[1], c[2], c[3]
	xs, ys := t.inputs(0), t.inputs(1)
	ys = ys[:len(xs)] // spares the loop its bounds check
	b := t.weights(portableNR)
	for k, x := range xs {
		y := ys[k]
		w := (*[portableNR]float32)(b)
		w0, w1, w2, w3 := w[0], w[1], w[2], w[3]
		c0 += x * w0
		d0 += y * w0
		c1 += x * w1
		d1 += y * w1
		c2 += x * w2
		d2 += y * w2
		c3 += x * w3
		d3 += y * w3
		b = b[portableNR:]
	}
	t.put(0, c0, c1, c2, c3)
	t.put(1, d0, d1, d2, d3)
}

// put stores a row's four sums, raised to the floor. A NaN compares false and stays.
func (t *tile) put(row int, sums ...float32) {
	out := t.sums(t.cout, row, portableNR)
	for j, c := range sums {
		if c < t.floor {
			c = t.floor
		}
		out[j] = c
	}
}
