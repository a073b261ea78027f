// SPDX-License-Identifier: Apache-2.0

// Package half converts between float32 and the element types that Go lacks, f16 and bf16.
package half

import (
	"errors"
	"math"

	"github.com/ringbatch/ringbatch/tensor"
)

// Bits is the f16 or bf16 nearest to v.
func Bits(d tensor.DType, v float32) (uint16, error) {
	all := math.Float32bits(v)
	sign, size := uint16(all>>16)&0x8000, math.Abs(float64(v))
	infinite := uint64(0x7c00)
	if d == tensor.BF16 {
		infinite = 0x7f80
	}
	var bits uint64
	switch {
	case math.IsNaN(size):
		return sign | 0x7fff, nil
	case math.IsInf(size, 0):
		return sign | uint16(infinite), nil
	case d == tensor.BF16: // the upper half of a float32, rounded to even
		bits = (uint64(all&0x7fffffff) + 0x7fff + uint64(all>>16&1)) >> 16
	default:
		// A number of steps; 1024 steps are the smallest normal number. Steps and exponent
		// add up to the bits, even if rounding carries.
		exponent := max(math.Ilogb(size), -14)
		steps := math.RoundToEven(math.Ldexp(size, 10-exponent))
		bits = uint64(exponent+14)<<10 + uint64(steps)
	}
	if bits >= infinite {
		return 0, errors.New("value out of range")
	}
	return sign | uint16(bits), nil
}

// Float32 is the number of the given bits.
func Float32(d tensor.DType, bits uint16) float32 {
	if d == tensor.BF16 {
		return math.Float32frombits(uint32(bits) << 16)
	}
	var v float64
	switch exponent, rest := int(bits>>10&31), float64(bits&1023); {
	case exponent == 31 && rest != 0:
		v = math.NaN()
	case exponent == 31:
		v = math.Inf(1)
	case exponent == 0:
		v = math.Ldexp(rest, -24)
	default:
		v = math.Ldexp(1024+rest, exponent-25)
	}
	if bits&0x8000 != 0 {
		v = -v
	}
	return float32(v)
}
