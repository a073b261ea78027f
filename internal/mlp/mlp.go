// SPDX-License-Identifier: Apache-2.0

// Package mlp is a float32 multi-layer perceptron on which batching pays: its weights are far larger than a core's caches,
// so one row costs a whole pass over memory, and thirty-two rows cost little more.
//
//	m, err := mlp.New(mlp.Default()) // 1024 → 4096 → 4096 → 1024, 96 MiB of weights, the same for the same seed
//	m.ForwardRows(dstRows, srcRows)  // rows anywhere, e.g. slots of a ring
//
// ReLU follows every hidden layer. A kernel in assembly (AVX2+FMA) or plain Go walks weights that are packed in the order in
// which it reads them (layout.go); a batch reads each weight from memory once.
//
// An MLP has scratch memory and serves one goroutine at a time. A call allocates only when it has more rows than any before.
// Inputs are copied before outputs are written, so dst may be the memory of src.
//
// Each output is one chain over k = 0, 1, 2 …: bias, then one fused multiply-add per input. Neither the row count nor the
// place of a row in the batch changes its bits. The portable kernel rounds after the multiplication where the compiler has no
// fused instruction. Against float64, each output of one layer is off by at most (k+2)·2⁻²³·(|bias| + Σ|x·w|).
package mlp

import (
	"errors"
	"fmt"
	"math"
)

// Limits of a model.
const (
	maxWidth       = 1 << 20
	maxWeightBytes = 64 << 30
)

// ErrConfig is wrapped by every refusal of a Config.
var ErrConfig = errors.New("bad model shape")

// Config describes a model whose weights come from a seed.
type Config struct {
	Sizes []int // width of the input, of each hidden layer, of the output
	Seed  int64
}

// Default is the model of the benchmark: 25.2 million weights, 96 MiB.
func Default() Config { return Config{Sizes: []int{1024, 4096, 4096, 1024}, Seed: 1} }

// Validate refuses sizes that no model can have.
func (c Config) Validate() error {
	bytes := int64(0)
	for i, s := range c.Sizes {
		if s < 1 || s > maxWidth {
			return fmt.Errorf("%w: size %d is %d, must be 1..%d", ErrConfig, i, s, maxWidth)
		}
		if i > 0 {
			bytes += (int64(c.Sizes[i-1]) + 1) * int64(s) * 4
		}
	}
	if len(c.Sizes) < 2 || bytes > maxWeightBytes {
		return fmt.Errorf("%w: %d sizes and %d bytes of weights", ErrConfig, len(c.Sizes), bytes)
	}
	return nil
}

// MLP is a model ready to run.
type MLP struct {
	sizes  []int
	kernel *kernel
	layers []*layer
	stride int  // floats from one scratch row to the next
	tile   tile // of the running call, to save an allocation

	// Activations; x and y swap roles after each layer. The tables hold the address of each row.
	x, y                    []float32
	xTable, yTable, biasTab []*float32
}

// New makes a model from its seed.
func New(cfg Config) (*MLP, error) { return newOn(bestKernel(), cfg) }

func newOn(k *kernel, cfg Config) (*MLP, error) {
	m, err := build(k, cfg.Sizes)
	if err != nil {
		return nil, fmt.Errorf("new model: %w", err)
	}
	for i, l := range m.layers {
		l.seed(cfg.Seed, i)
	}
	return m, nil
}

// build makes a model whose weights are still zero.
func build(k *kernel, sizes []int) (*MLP, error) {
	if err := (Config{Sizes: sizes}).Validate(); err != nil {
		return nil, err
	}
	m := &MLP{sizes: append([]int(nil), sizes...), kernel: k, layers: newLayers(sizes, k.nr)}
	widest := 0
	for _, l := range m.layers {
		widest = max(widest, l.kPad, l.nPad)
	}
	// One cache line more than the widest row needs: rows a power of two apart would share a set of the first-level cache.
	m.stride = roundUp(widest, cacheLine/4) + cacheLine/4
	return m, nil
}

// In is the width of an input row, Out that of an output row.
func (m *MLP) In() int  { return m.sizes[0] }
func (m *MLP) Out() int { return m.sizes[len(m.sizes)-1] }

// Sizes is the shape, as in Config.
func (m *MLP) Sizes() []int { return append([]int(nil), m.sizes...) }

// Kernel names the kernel in use: avx2 or portable.
func (m *MLP) Kernel() string { return m.kernel.name }

// Layers is the number of layers.
func (m *MLP) Layers() int { return len(m.layers) }

// Weights copies layer i as torch's nn.Linear has it: w[out][in], row after row, and the bias.
func (m *MLP) Weights(i int) (w, bias []float32) {
	l := m.layers[i]
	w = make([]float32, l.out*l.in)
	for o := range l.out {
		l.row(w[o*l.in:(o+1)*l.in], o)
	}
	return w, append([]float32(nil), l.bias[:l.out]...)
}

// reserve makes room for a number of rows.
func (m *MLP) reserve(rows int) {
	if rows <= len(m.xTable) {
		return
	}
	m.x, m.y = alignedFloats(rows*m.stride), alignedFloats(rows*m.stride)
	m.xTable, m.yTable, m.biasTab = make([]*float32, rows), make([]*float32, rows), make([]*float32, rows)
	for r := range rows {
		m.xTable[r], m.yTable[r] = &m.x[r*m.stride], &m.y[r*m.stride]
	}
}

// Forward runs a contiguous batch: src is rows × In, dst is rows × Out. It panics when they are shorter than that.
func (m *MLP) Forward(dst, src []float32, rows int) {
	if rows < 0 || rows > len(src)/m.In() || rows > len(dst)/m.Out() {
		panic(fmt.Sprintf("mlp: %d rows of %d inputs and %d outputs don't fit into %d and %d", rows, m.In(), m.Out(), len(src), len(dst)))
	}
	m.reserve(rows)
	for r := range rows {
		m.gather(r, src[r*m.In():])
	}
	m.forward(rows)
	for r := range rows {
		copy(dst[r*m.Out():(r+1)*m.Out()], m.x[r*m.stride:])
	}
}

// ForwardRows runs a batch whose rows lie anywhere. It panics when the row counts differ or a row is short.
func (m *MLP) ForwardRows(dst, src [][]float32) {
	if len(dst) != len(src) {
		panic(fmt.Sprintf("mlp: %d rows of input, %d of output", len(src), len(dst)))
	}
	for r := range src { // before anything is written: a short row must not leave half a batch
		if len(src[r]) < m.In() || len(dst[r]) < m.Out() {
			panic(fmt.Sprintf("mlp: row %d has %d inputs and %d outputs, need %d and %d", r, len(src[r]), len(dst[r]), m.In(), m.Out()))
		}
	}
	m.reserve(len(src))
	for r := range src {
		m.gather(r, src[r])
	}
	m.forward(len(src))
	for r := range dst {
		copy(dst[r][:m.Out()], m.x[r*m.stride:])
	}
}

// gather copies one input row into the scratch and zeroes its padding.
func (m *MLP) gather(r int, row []float32) {
	x := m.x[r*m.stride : r*m.stride+m.layers[0].kPad]
	clear(x[copy(x, row[:m.In()]):])
}

// forward runs all layers. x has the outputs afterwards.
func (m *MLP) forward(rows int) {
	for i, l := range m.layers {
		for r := range rows {
			m.biasTab[r] = &l.bias[0]
		}
		m.kernel.runLayer(&m.tile, l, rows, m.x, m.stride, m.biasTab, m.yTable, i < len(m.layers)-1)
		m.x, m.y = m.y, m.x
		m.xTable, m.yTable = m.yTable, m.xTable
	}
}

// Seeded weights. Each is a hash of (seed, layer, index), so the model does not depend on the packing. He's uniform bound
// √(6/in) keeps the variance of activations the same from one ReLU layer to the next.
const golden = 0x9e3779b97f4a7c15

// mix is the finalizer of SplitMix64.
func mix(z uint64) uint64 {
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}

// uniform maps a hash to [-bound, bound) by 24 bits, the precision of a float32.
func uniform(h uint64, bound float32) float32 {
	return (float32(int32(uint32(h>>32))>>8) * (1.0 / (1 << 23))) * bound
}

func (l *layer) seed(seed int64, index int) {
	key := mix(uint64(seed)*golden + uint64(index) + 1)
	bound := float32(math.Sqrt(6 / float64(l.in)))
	l.fill(func(row []float32, o int) {
		at := key + uint64(o)*uint64(l.in)*golden
		for k := range row {
			at += golden
			row[k] = uniform(mix(at), bound)
		}
	})
	key = mix(key)
	for o := range l.out {
		l.bias[o] = uniform(mix(key+uint64(o)*golden), 0.1)
	}
}
