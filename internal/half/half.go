// SPDX-License-Identifier: Apache-2.0

// Package half converts between float32 and the element types that Go lacks: f16, bf16, and those of 8 bits.
package half

import (
	"errors"
	"math"

	"github.com/ringbatch/ringbatch/tensor"
)

// Bits of the fraction, the exponent of the smallest normal number, and the largest number's bits. Infinity follows it,
// which f8e4m3fn has none of, then NaN.
var formats = [...]struct {
	fraction, least int
	largest         uint64
}{tensor.F16: {10, -14, 0x7bff}, tensor.BF16: {7, -126, 0x7f7f}, tensor.F8E4M3FN: {3, -6, 0x7e}, tensor.F8E5M2: {2, -14, 0x7b}}

// Bits is the number of type d nearest to v.
func Bits(d tensor.DType, v float32) (uint16, error) {
	f, size, sign := formats[d], math.Abs(float64(v)), uint16(1)<<(8*d.Size()-1)
	bits := f.largest + 1
	switch {
	case math.IsNaN(size):
		bits = uint64(sign) - 1
	case !math.IsInf(size, 0):
		// A number of steps; 1<<fraction steps are the smallest normal number. Steps and exponent
		// add up to the bits, even if rounding carries.
		exponent := max(math.Ilogb(size), f.least)
		steps := math.RoundToEven(math.Ldexp(size, f.fraction-exponent))
		bits = uint64(exponent-f.least)<<f.fraction + uint64(steps)
	}
	if bits > f.largest && (d == tensor.F8E4M3FN || !math.IsInf(size, 0)) && !math.IsNaN(size) {
		return 0, errors.New("value out of range")
	}
	if !math.Signbit(float64(v)) {
		sign = 0
	}
	return sign | uint16(bits), nil
}

// Float32 is the number of the given bits.
func Float32(d tensor.DType, bits uint16) float32 {
	f, sign := formats[d], uint16(1)<<(8*d.Size()-1)
	size := uint64(bits &^ sign)
	exponent, rest := int(size>>f.fraction), size&(1<<f.fraction-1)
	var v float64
	switch {
	case size == f.largest+1 && d != tensor.F8E4M3FN:
		v = math.Inf(1)
	case size > f.largest:
		v = math.NaN()
	case exponent == 0:
		v = math.Ldexp(float64(rest), f.least-f.fraction)
	default:
		v = math.Ldexp(float64(1<<f.fraction+rest), exponent-1+f.least-f.fraction)
	}
	if bits&sign != 0 {
		v = -v
	}
	return float32(v)
}
