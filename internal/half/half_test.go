// SPDX-License-Identifier: Apache-2.0

package half

import (
	"math"
	"testing"

	"github.com/ringbatch/ringbatch/tensor"
)

func TestEveryHalfIsReadAndTyped(t *testing.T) {
	for _, d := range []tensor.DType{tensor.F16, tensor.BF16, tensor.F8E4M3FN, tensor.F8E5M2} {
		for bits := range 1 << (8 * d.Size()) {
			v := Float32(d, uint16(bits))
			got, err := Bits(d, v)
			if v != v { // any NaN will do
				if v = Float32(d, got); v == v || err != nil {
					t.Errorf("%s %04x: NaN became %v, %v", d, bits, v, err)
				}
			} else if int(got) != bits || err != nil {
				t.Fatalf("%s %04x: %v became %04x, %v", d, bits, v, got, err)
			}
		}
	}
}

func TestHalvesAreRoundedToTheNearestAndThenToEven(t *testing.T) {
	for _, c := range []struct {
		d    tensor.DType
		v    float32
		bits uint16
	}{
		{tensor.F16, 1, 0x3c00},
		{tensor.F16, -2, 0xc000},
		{tensor.F16, 65504, 0x7bff},
		{tensor.F16, 65519, 0x7bff},
		{tensor.F16, 0.1, 0x2e66},
		{tensor.F16, 1 + 1.0/2048, 0x3c00},      // a tie, to even
		{tensor.F16, 1 + 3.0/2048, 0x3c02},      // the next tie, to even
		{tensor.F16, 2 - 1.0/4096, 0x4000},      // carries into the exponent
		{tensor.F16, 0x1p-24, 0x0001},           // the smallest
		{tensor.F16, 0x1p-25, 0x0000},           // half of it: a tie, to even
		{tensor.F16, 0x1p-14 - 0x1p-26, 0x0400}, // the largest of the small ones carries
		{tensor.F16, float32(math.Inf(-1)), 0xfc00},
		{tensor.BF16, 1, 0x3f80},
		{tensor.BF16, 3.14159274, 0x4049},
		{tensor.BF16, 1 + 1.0/256, 0x3f80},
		{tensor.BF16, 1 + 3.0/256, 0x3f82},
		{tensor.BF16, float32(math.Inf(1)), 0x7f80},
		{tensor.F8E4M3FN, -0.3, 0xaa},
		{tensor.F8E4M3FN, 464, 0x7e}, // a tie, to even: 448
		{tensor.F8E4M3FN, 0x1p-9, 0x01},
		{tensor.F8E5M2, 0.3, 0x35},
		{tensor.F8E5M2, 61439, 0x7b},
		{tensor.F8E5M2, float32(math.Inf(-1)), 0xfc},
	} {
		if got, err := Bits(c.d, c.v); got != c.bits || err != nil {
			t.Errorf("%s of %v: %04x, not %04x, %v", c.d, c.v, got, c.bits, err)
		}
	}
	for v, d := range map[float32]tensor.DType{65520: tensor.F16, math.MaxFloat32: tensor.BF16, 464.1: tensor.F8E4M3FN,
		float32(math.Inf(1)): tensor.F8E4M3FN, 61440: tensor.F8E5M2} {
		if bits, err := Bits(d, v); err == nil {
			t.Errorf("%s of %v is %04x", d, v, bits)
		}
	}
}
