// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"

	"github.com/ringbatch/ringbatch/internal/mlp"
)

// A vector is one launch of a kernel and the check of its result. The same
// vectors run on the CPU (kernels_test.go) and on a GPU (gpu_test.go).
type vector struct {
	name, kernel string
	gridX, gridY int
	block        int
	args         []any // []byte: a buffer, as it is before; uint64: a number
	check        func(after [][]byte) error
}

func vectors() []vector {
	var list []vector
	for _, size := range []int{1, 3, 4, 16, 100, 4096, 16384, 20000, 49152} {
		list = append(list, gatherVector(size, 5, 5), scatterVector(size, 5))
	}
	list = append(list, gatherVector(1000, 3, 8), gatherVector(64, 1, 1))
	for _, item := range []int{1, 8, 12, 96} {
		list = append(list, packedVector(item, []int{3, 0, 500, 1, 64}, 568), packedVector(item, []int{7, 2}, 1000))
	}
	list = append(list, affineF32(), affineI64())
	for _, s := range []struct{ rows, in, out int }{{1, 16, 16}, {5, 100, 70}, {33, 64, 130}} {
		list = append(list, denseF32(s.rows, s.in, s.out))
	}
	return list
}

func random(seed uint64, n int) []byte {
	r := rand.New(rand.NewPCG(seed, 7))
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	return b
}

func floats(seed uint64, n int) []float32 {
	r := rand.New(rand.NewPCG(seed, 9))
	v := make([]float32, n)
	for i := range v {
		v[i] = 2*r.Float32() - 1
	}
	return v
}

func toBytes[T any](v []T) []byte {
	var b bytes.Buffer
	_ = binary.Write(&b, binary.LittleEndian, v)
	return b.Bytes()
}

func fromBytes[T any](b []byte, n int) []T {
	v := make([]T, n)
	_ = binary.Read(bytes.NewReader(b), binary.LittleEndian, v)
	return v
}

// scattered are slots in no order, none twice.
func scattered(rows int) []uint32 {
	all := []uint32{9, 2, 14, 3, 7, 0, 11, 5}
	return all[:rows]
}

const ringSlots = 16

func gatherVector(size, rows, padded int) vector {
	stride := size + 32 - size%16 // rows with a gap between them
	if size%3 == 0 {
		stride = size // and without
	}
	plane, slots := random(uint64(size), ringSlots*stride), scattered(rows)
	to := random(3, padded*size) // never zero beforehand
	return vector{
		name: fmt.Sprintf("gather %d rows of %d bytes padded to %d", rows, size,
			padded), kernel: "rb_gather", gridX: 3, gridY: 1, block: 64,
		args: []any{to, uint64(size), plane, uint64(stride), toBytes(slots), uint64(size), uint64(rows), uint64(padded)},
		check: func(after [][]byte) error {
			want := make([]byte, padded*size)
			for r, s := range slots {
				copy(want[r*size:(r+1)*size], plane[int(s)*stride:])
			}
			return same(after[0], want)
		},
	}
}

// packedVector gathers rows of different sizes, counted in items, and clears the items behind them.
func packedVector(item int, sizes []int, padded int) vector {
	stride, slots, offsets := 512*item, scattered(len(sizes)), []uint32{0}
	plane := random(uint64(item), ringSlots*stride)
	want, most := make([]byte, 0, padded*item), 0
	for r, n := range sizes {
		want = append(want, plane[int(slots[r])*stride:][:n*item]...)
		offsets, most = append(offsets, offsets[r]+uint32(n)), max(most, n*item)
	}
	return vector{
		name: fmt.Sprintf("gather packed rows of %v items of %d bytes padded to %d", sizes, item, padded), kernel: "rb_gather_packed",
		gridX: 3, gridY: 1, block: 64,
		args: []any{random(3, padded*item), plane, uint64(stride), toBytes(slots), toBytes(offsets), uint64(item), uint64(len(sizes)),
			uint64(most), uint64(padded)},
		check: func(after [][]byte) error { return same(after[0], want[:padded*item]) },
	}
}

func scatterVector(size, rows int) vector {
	stride := size
	plane, slots, from := random(5, ringSlots*stride), scattered(rows), random(uint64(size), rows*size)
	return vector{
		name: fmt.Sprintf("scatter %d rows of %d bytes", rows, size), kernel: "rb_scatter", gridX: 2, gridY: 1, block: 64,
		args: []any{plane, uint64(stride), from, uint64(size), toBytes(slots), uint64(size), uint64(rows)},
		check: func(after [][]byte) error {
			want := bytes.Clone(plane) // slots that are not named stay as they are
			for r, s := range slots {
				copy(want[int(s)*stride:int(s)*stride+size], from[r*size:])
			}
			return same(after[0], want)
		},
	}
}

func same(got, want []byte) error {
	for i := range want {
		if got[i] != want[i] {
			return fmt.Errorf("byte %d of %d is %d, want %d", i, len(want), got[i], want[i])
		}
	}
	return nil
}

func affineF32() vector {
	x := floats(1, 1000)
	scale, offset := float32(1.7), float32(-0.3)
	return vector{
		name: "affine f32 rounds after the product", kernel: "rb_affine_f32", gridX: 2, gridY: 1, block: 128,
		args: []any{make([]byte, 4000), toBytes(x), uint64(1000), uint64(math.Float32bits(scale)), uint64(math.Float32bits(offset))},
		check: func(after [][]byte) error {
			want := make([]float32, len(x))
			for i, v := range x {
				product := scale * v
				want[i] = float32(product) + offset
			}
			return same(after[0], toBytes(want))
		},
	}
}

func affineI64() vector {
	x := []int64{0, 1, -1, math.MaxInt64, math.MinInt64, 1 << 40}
	return vector{
		name: "affine i64 wraps around", kernel: "rb_affine_i64", gridX: 1, gridY: 1, block: 32,
		args: []any{make([]byte, 48), toBytes(x), uint64(6), uint64(3), ^uint64(0)},
		check: func(after [][]byte) error {
			want := make([]int64, len(x))
			for i, v := range x {
				want[i] = 3*v - 1
			}
			return same(after[0], toBytes(want))
		},
	}
}

// denseF32 must give the bits of the CPU's vector kernels.
func denseF32(rows, in, out int) vector {
	m, err := mlp.New(mlp.Config{Sizes: []int{in, out}, Seed: 5})
	if err != nil {
		panic(err)
	}
	w, bias := m.Weights(0)
	turned := make([]float32, len(w))
	for o := range out {
		for k := range in {
			turned[k*out+o] = w[o*in+k]
		}
	}
	x := floats(uint64(in), rows*in)
	return vector{
		name: fmt.Sprintf("dense f32 %d×%d→%d is the CPU's model", rows, in, out), kernel: "rb_dense_f32", gridX: (out +
			63) / 64, gridY: (rows + 3) / 4, block: 64,
		args: []any{make([]byte, 4*rows*out), uint64(out), toBytes(x), uint64(in), toBytes(turned), toBytes(bias), uint64(rows),
			uint64(in), uint64(out), uint64(0)},
		check: func(after [][]byte) error {
			want := make([]float32, rows*out)
			m.Forward(want, x, rows)
			got := fromBytes[float32](after[0], rows*out)
			if m.Kernel() == "portable" { // rounds after the product: not the same bits
				return near(got, want, 1e-6)
			}
			return same(after[0], toBytes(want))
		},
	}
}

// near compares by ‖got − want‖ / ‖want‖; NaN never passes.
func near(got, want []float32, tolerance float64) error {
	var off, all float64
	for i := range want {
		d := float64(got[i]) - float64(want[i])
		off += d * d
		all += float64(want[i]) * float64(want[i])
	}
	if e := math.Sqrt(off / all); !(e <= tolerance) {
		return fmt.Errorf("relative error %.2g, at most %.2g", e, tolerance)
	}
	return nil
}
