// SPDX-License-Identifier: Apache-2.0

package mlp

import "fmt"

// MLP is a model ready to run. See the package's comment for who may use it when.
type MLP struct {
	sizes  []int
	kernel *kernel
	layers []*layer

	stride  int // floats from one scratch row to the next
	scratch scratch
	tile    tile // of the call that runs, only to save allocating it
	job     job
}

// scratch holds activations. x and y swap roles after each layer; the tables are
// what a micro-kernel reads to find its rows.
type scratch struct {
	rows   int
	x, y   []float32
	xTable []*float32
	yTable []*float32
	bias   []*float32
	dst    []*float32
}

// New makes a model from its seed.
func New(cfg Config, opts ...Option) (*MLP, error) {
	m, err := build(cfg.Sizes, opts)
	if err != nil {
		return nil, fmt.Errorf("new model: %w", err)
	}
	for i, l := range m.layers {
		l.seed(cfg.Seed, i)
	}
	return m, nil
}

// build makes a model whose weights are still zero.
func build(sizes []int, opts []Option) (*MLP, error) {
	if err := (Config{Sizes: sizes}).Validate(); err != nil {
		return nil, err
	}
	k, err := pickKernel(collect(opts).kernel)
	if err != nil {
		return nil, err
	}
	m := &MLP{sizes: append([]int(nil), sizes...), kernel: k, layers: newLayers(sizes, k.nr)}
	m.stride = strideOf(m.layers)
	return m, nil
}

// strideOf leaves one cache line more than the widest row needs: rows a power of
// two apart would all fall into the same set of the first-level cache.
func strideOf(layers []*layer) int {
	widest := 0
	for _, l := range layers {
		widest = max(widest, l.kPad, l.nPad)
	}
	const line = cacheLine / 4
	return roundUp(widest, line) + line
}

// In is the width of an input row, Out that of an output row.
func (m *MLP) In() int  { return m.sizes[0] }
func (m *MLP) Out() int { return m.sizes[len(m.sizes)-1] }

// Sizes is the shape, as in Config.
func (m *MLP) Sizes() []int { return append([]int(nil), m.sizes...) }

// Kernel names the micro-kernels in use.
func (m *MLP) Kernel() string { return m.kernel.name }

// Reserve prepares the scratch for batches of up to so many rows, so that even
// the first call allocates nothing.
func (m *MLP) Reserve(rows int) {
	s := &m.scratch
	if rows <= s.rows {
		return
	}
	*s = scratch{
		rows: rows,
		x:    alignedFloats(rows * m.stride), y: alignedFloats(rows * m.stride),
		xTable: make([]*float32, rows), yTable: make([]*float32, rows),
		bias: make([]*float32, rows), dst: make([]*float32, rows),
	}
	for r := range rows {
		s.xTable[r], s.yTable[r] = &s.x[r*m.stride], &s.y[r*m.stride]
	}
}

// Forward runs a contiguous batch: src is rows × In, dst is rows × Out, row after
// row. It panics when they are shorter than that.
func (m *MLP) Forward(dst, src []float32, rows int) {
	if rows < 0 || rows > len(src)/m.In() || rows > len(dst)/m.Out() {
		panic(fmt.Sprintf("mlp: %d rows of %d inputs and %d outputs don't fit into %d and %d",
			rows, m.In(), m.Out(), len(src), len(dst)))
	}
	m.Reserve(rows)
	for r := range rows {
		m.gather(r, src[r*m.In():(r+1)*m.In()])
		m.scratch.dst[r] = &dst[r*m.Out()]
	}
	m.forward(rows)
	for r := range rows {
		m.scatterTail(r, dst[r*m.Out():(r+1)*m.Out()])
	}
}

// ForwardRows runs a batch whose rows lie anywhere. The inputs are gathered into
// the scratch, where the kernels want them anyway; the outputs are written
// straight to their rows. It panics when the row counts differ or a row is short.
func (m *MLP) ForwardRows(dst, src [][]float32) {
	if len(dst) != len(src) {
		panic(fmt.Sprintf("mlp: %d rows of input, %d of output", len(src), len(dst)))
	}
	// All are checked first: a short row must not leave half a batch written.
	for r := range src {
		if len(src[r]) < m.In() || len(dst[r]) < m.Out() {
			panic(fmt.Sprintf("mlp: row %d has %d inputs and %d outputs, need %d and %d",
				r, len(src[r]), len(dst[r]), m.In(), m.Out()))
		}
	}
	m.Reserve(len(src))
	for r := range src {
		m.gather(r, src[r][:m.In()])
		m.scratch.dst[r] = &dst[r][0]
	}
	m.forward(len(src))
	for r := range dst {
		m.scatterTail(r, dst[r][:m.Out()])
	}
}

// gather copies one input row into the scratch and zeroes its padding.
func (m *MLP) gather(r int, row []float32) {
	x := m.scratch.x[r*m.stride : r*m.stride+m.layers[0].kPad]
	clear(x[copy(x, row):])
}

// forward runs all layers from x to the rows in scratch.dst.
func (m *MLP) forward(rows int) {
	if rows == 0 {
		return
	}
	s := &m.scratch
	for i, l := range m.layers {
		for r := range rows {
			s.bias[r] = &l.bias[0]
		}
		m.job = job{layer: l, rows: rows, x: s.x, bias: s.bias, y: s.yTable, dst: s.yTable, relu: true}
		if i == len(m.layers)-1 {
			m.job.dst, m.job.relu = s.dst, false
		}
		m.kernel.run(&m.tile, &m.job, m.stride)
		s.x, s.y = s.y, s.x
		s.xTable, s.yTable = s.yTable, s.xTable
	}
	// Now x holds what the last layer left in its scratch rows. The caller's
	// memory may be unmapped after this call: forget where it was.
	clear(s.dst[:rows])
	m.job, m.tile = job{}, tile{}
}

// scatterTail copies the columns of the last, partly filled panel to an output row.
func (m *MLP) scatterTail(r int, row []float32) {
	l := m.layers[len(m.layers)-1]
	whole := l.out / l.nr * l.nr
	copy(row[whole:], m.scratch.x[r*m.stride+whole:r*m.stride+l.out])
}
