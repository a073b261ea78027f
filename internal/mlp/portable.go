package mlp

// The portable kernel: 4 columns, 1 or 4 rows. Sixteen running sums are what the
// compiler can keep in registers, and each weight is loaded once for four rows.
// Its k order is that of the others; see doc.go for what the bits then are.

const portableNR = 4

func portable() *kernel {
	return &kernel{name: "portable", nr: portableNR, rows: []func(*tile){
		nil,
		func(t *tile) { portableRows(t, 1) },
		func(t *tile) { portableRows(t, 2) },
		func(t *tile) { portableRows(t, 3) },
		portable4,
	}}
}

func portableRows(t *tile, rows int) {
	for r := range rows {
		in, out := t.sums(t.cin, r, portableNR), t.sums(t.cout, r, portableNR)
		c0, c1, c2, c3 := in[0], in[1], in[2], in[3]
		b := t.weights(portableNR)
		for _, x := range t.inputs(r) {
			w := (*[4]float32)(b)
			c0 += x * w[0]
			c1 += x * w[1]
			c2 += x * w[2]
			c3 += x * w[3]
			b = b[4:]
		}
		t.put(out, c0, c1, c2, c3)
	}
}

func portable4(t *tile) {
	var c [4][4]float32
	for r := range c {
		c[r] = [4]float32(t.sums(t.cin, r, portableNR))
	}
	p0, p1, p2, p3 := c[0], c[1], c[2], c[3]
	x0, x1, x2, x3 := t.inputs(0), t.inputs(1), t.inputs(2), t.inputs(3)
	b := t.weights(portableNR)
	for k, x := range x0 {
		w := (*[4]float32)(b)
		w0, w1, w2, w3 := w[0], w[1], w[2], w[3]
		p0[0] += x * w0
		p0[1] += x * w1
		p0[2] += x * w2
		p0[3] += x * w3
		x = x1[k]
		p1[0] += x * w0
		p1[1] += x * w1
		p1[2] += x * w2
		p1[3] += x * w3
		x = x2[k]
		p2[0] += x * w0
		p2[1] += x * w1
		p2[2] += x * w2
		p2[3] += x * w3
		x = x3[k]
		p3[0] += x * w0
		p3[1] += x * w1
		p3[2] += x * w2
		p3[3] += x * w3
		b = b[4:]
	}
	for r, p := range [][4]float32{p0, p1, p2, p3} {
		t.put(t.sums(t.cout, r, portableNR), p[0], p[1], p[2], p[3])
	}
}

// put stores four sums, raised to the floor. A NaN compares false and stays.
func (t *tile) put(out []float32, c0, c1, c2, c3 float32) {
	for j, c := range [4]float32{c0, c1, c2, c3} {
		if c < t.floor {
			c = t.floor
		}
		out[j] = c
	}
}
