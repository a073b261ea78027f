// SPDX-License-Identifier: Apache-2.0

package mlp

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/ringbatch/ringbatch/internal/must"
)

// kernels are the kernels of this CPU, by name.
func kernels() map[string]*kernel {
	all := map[string]*kernel{}
	for _, k := range []*kernel{bestKernel(), portable()} {
		all[k.name] = k
	}
	return all
}

func newTest(t *testing.T, k *kernel, sizes ...int) *MLP {
	t.Helper()
	m, err := newOn(k, Config{Sizes: sizes, Seed: 7})
	must.Do(t, err)
	return m
}

func randomRows(rng *rand.Rand, rows, width int) []float32 {
	s := make([]float32, rows*width)
	for i := range s {
		s[i] = float32(rng.NormFloat64())
	}
	return s
}

// reference is the dumb version in float64. Its bound is the one the package comment states,
// for the last layer.
type reference struct{ weights, bias [][]float32 }

func newReference(m *MLP) reference {
	var ref reference
	for _, l := range m.layers {
		w := make([]float32, l.in*l.out)
		for o := range l.out {
			l.row(w[o*l.in:(o+1)*l.in], o)
		}
		ref.weights, ref.bias = append(ref.weights, w), append(ref.bias, l.bias[:l.out])
	}
	return ref
}

func (ref reference) forward(src []float32) (want, bound []float64) {
	x := make([]float64, len(src))
	for i, v := range src {
		x[i] = float64(v)
	}
	for i, w := range ref.weights {
		y, e := make([]float64, len(ref.bias[i])), make([]float64, len(ref.bias[i]))
		for o, b := range ref.bias[i] {
			sum, abs := float64(b), math.Abs(float64(b))
			for k, v := range x {
				v *= float64(w[o*len(x)+k])
				sum += v
				abs += math.Abs(v)
			}
			if i < len(ref.weights)-1 {
				sum = max(0, sum)
			}
			y[o], e[o] = sum, float64(len(x)+2)*0x1p-23*abs
		}
		x, bound = y, e
	}
	return x, bound
}

func TestEveryKernelAgreesWithFloat64WithinTheStatedBound(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	shapes := [][]int{{1, 1}, {3, 5}, {4, 4}, {5, 33}, {16, 32}, {17, 31}, {1023, 37}, {1024, 64}, {1025, 65}, {2049, 19}, {3075, 16}}
	for range 6 {
		shapes = append(shapes, []int{1 + rng.IntN(1200), 1 + rng.IntN(200)})
	}
	for name, k := range kernels() {
		t.Run(name, func(t *testing.T) {
			for _, sizes := range shapes {
				m := newTest(t, k, sizes...)
				ref := newReference(m)
				for _, rows := range []int{1, 1 + rng.IntN(67)} {
					checkRows(t, m, ref, rng, rows)
				}
			}
		})
	}
}

func checkRows(t *testing.T, m *MLP, ref reference, rng *rand.Rand, rows int) {
	t.Helper()
	src := randomRows(rng, rows, m.In())
	dst := make([]float32, rows*m.Out())
	m.Forward(dst, src, rows)
	for r := range rows {
		want, bound := ref.forward(src[r*m.In() : (r+1)*m.In()])
		for o, w := range want {
			if got := float64(dst[r*m.Out()+o]); !(math.Abs(got-w) <= bound[o]) {
				t.Fatalf("%s %v, %d rows: row %d output %d is %g, want %g ± %g", m.kernel.name, m.sizes, rows, r, o, got, w, bound[o])
			}
		}
	}
}

func TestADeepModelAgreesWithFloat64(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 1))
	for name, k := range kernels() {
		m := newTest(t, k, 100, 613, 1030, 77, 129)
		ref := newReference(m)
		src := randomRows(rng, 5, m.In())
		dst := make([]float32, 5*m.Out())
		m.Forward(dst, src, 5)
		for r := range 5 {
			want, _ := ref.forward(src[r*m.In() : (r+1)*m.In()])
			for o, w := range want {
				if got := float64(dst[r*m.Out()+o]); math.Abs(got-w) > 2e-5*(1+math.Abs(w)) {
					t.Fatalf("%s: row %d output %d is %g, want %g", name, r, o, got, w)
				}
			}
		}
	}
}

func bits(s []float32) []uint32 {
	b := make([]uint32, len(s))
	for i, v := range s {
		b[i] = math.Float32bits(v)
	}
	return b
}

func TestARowHasTheSameBitsInEveryBatchSizeAndAtEveryPosition(t *testing.T) {
	rng := rand.New(rand.NewPCG(4, 1))
	for name, k := range kernels() {
		t.Run(name, func(t *testing.T) {
			m := newTest(t, k, 33, 1030, 45)
			row := randomRows(rng, 1, m.In())
			alone := make([]float32, m.Out())
			m.Forward(alone, row, 1)
			for _, rows := range []int{2, 3, 5, 14, 15, 16, 31, 32, 33, 64, 67} {
				for at := rng.IntN(3); at < rows; at += 1 + rows/6 {
					src, dst := randomRows(rng, rows, m.In()), make([]float32, rows*m.Out())
					copy(src[at*m.In():], row)
					m.Forward(dst, src, rows)
					if !slices.Equal(bits(dst[at*m.Out():(at+1)*m.Out()]), bits(alone)) {
						t.Fatalf("row %d of %d differs from the same row alone", at, rows)
					}
				}
			}
		})
	}
}

func TestScatteredRowsGiveTheSameAsAContiguousBatchAndTouchNothingElse(t *testing.T) {
	rng := rand.New(rand.NewPCG(6, 1))
	for name, k := range kernels() {
		for _, out := range []int{64, 50, 3} {
			m := newTest(t, k, 40, 90, out)
			const rows = 33
			src := randomRows(rng, rows, m.In())
			want := make([]float32, rows*out)
			m.Forward(want, src, rows)

			// Slots far apart, output in front of input, in shuffled order.
			const guard = 12345
			slot := out + 1 + m.In() + 1
			mem := make([]float32, rows*slot)
			ins, outs := make([][]float32, rows), make([][]float32, rows)
			for r, s := range rng.Perm(rows) {
				outs[r] = mem[s*slot:][:out]
				ins[r] = mem[s*slot+out+1:][:m.In()]
				copy(ins[r], src[r*m.In():])
				mem[s*slot+out], mem[s*slot+slot-1] = guard, guard
			}
			m.ForwardRows(outs, ins)
			for r := range rows {
				if !slices.Equal(bits(outs[r]), bits(want[r*out:(r+1)*out])) {
					t.Fatalf("%s: scattered row %d differs", name, r)
				}
				if mem[r*slot+out] != guard || mem[r*slot+slot-1] != guard {
					t.Fatalf("%s: memory around slot %d was written", name, r)
				}
			}
		}
	}
}

func TestOutputsMayOverwriteTheirInputs(t *testing.T) {
	m := newTest(t, bestKernel(), 64, 100, 64)
	src := randomRows(rand.New(rand.NewPCG(7, 1)), 20, 64)
	want := make([]float32, len(src))
	m.Forward(want, src, 20)
	m.Forward(src, src, 20)
	if !slices.Equal(bits(src), bits(want)) {
		t.Error("in place differs")
	}
}
