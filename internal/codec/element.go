// SPDX-License-Identifier: Apache-2.0

// Package codec converts the elements of tensors to text and back: typed numbers, JSON, and
// .npy files. It works on raw little-endian bytes, as slots have them.
package codec

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"strconv"

	"github.com/ringbatch/ringbatch/internal/half"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

var le = binary.LittleEndian

// Put parses text and writes the element into p, which has the dtype's size. A float may
// be any text that strconv reads, including NaN and Inf; a bool is true, false, 1 or 0.
// A number that the dtype cannot hold is an error.
func Put(p []byte, d tensor.DType, text []byte) error {
	if why := put(p, d, text); why != nil {
		return fmt.Errorf("%w: %.32q is no %s: %w", status.ErrDType, text, d, why)
	}
	return nil
}

var (
	errSyntax = errors.New("want a whole number")
	errRange  = errors.New("value out of range")
)

func put(p []byte, d tensor.DType, text []byte) error {
	switch d {
	case tensor.Bool:
		switch string(text) {
		case "true", "1":
			p[0] = 1
		case "false", "0":
			p[0] = 0
		default:
			return errors.New("want true, false, 1 or 0")
		}
		return nil
	}
	if isFloat(d) {
		return putFloat(p, d, text)
	}
	v, err := parseInt(text)
	if err != nil {
		return err
	}
	low, high := int64(math.MinInt64)>>(64-8*d.Size()), int64(math.MaxInt64)>>(64-8*d.Size())
	if d == tensor.U8 {
		low, high = 0, math.MaxUint8
	}
	if v < low || v > high {
		return errRange
	}
	for i := range d.Size() { // little endian
		p[i] = byte(v >> (8 * i))
	}
	return nil
}

// isFloat reports whether the numbers of that type have fractions.
func isFloat(d tensor.DType) bool { return d >= tensor.F16 && d != tensor.Str }

func putFloat(p []byte, d tensor.DType, text []byte) error {
	bits := 32
	if d == tensor.F64 {
		bits = 64
	}
	v, err := strconv.ParseFloat(string(text), bits)
	if err != nil {
		return errors.Unwrap(err) // without the text, which may be long
	}
	switch d {
	case tensor.F64:
		le.PutUint64(p, math.Float64bits(v))
	case tensor.F32:
		le.PutUint32(p, math.Float32bits(float32(v)))
	default:
		h, err := half.Bits(d, float32(v))
		if err != nil {
			return err
		}
		if p[0] = byte(h); d.Size() == 2 {
			le.PutUint16(p, h)
		}
	}
	return nil
}

// parseInt reads a whole number in base 10.
func parseInt(text []byte) (int64, error) {
	digits := text
	if len(digits) > 0 && (digits[0] == '-' || digits[0] == '+') {
		digits = digits[1:]
	}
	if len(digits) == 0 {
		return 0, errSyntax
	}
	n := uint64(0)
	for _, c := range digits {
		switch {
		case c < '0' || c > '9':
			return 0, errSyntax
		case n > math.MaxUint64/10-1: // the next digit could overflow
			return 0, errRange
		}
		n = n*10 + uint64(c-'0')
	}
	switch {
	case text[0] == '-' && n <= 1<<63:
		return -int64(n), nil
	case text[0] != '-' && n < 1<<63:
		return int64(n), nil
	}
	return 0, errRange
}

// Append appends the element at the start of p as text. A float is the shortest number
// that reads as the same value, or NaN, Infinity, -Infinity.
func Append(b []byte, d tensor.DType, p []byte) []byte {
	switch d {
	case tensor.Bool:
		return strconv.AppendBool(b, p[0] != 0)
	case tensor.U8:
		return strconv.AppendUint(b, uint64(p[0]), 10)
	case tensor.I8:
		return strconv.AppendInt(b, int64(int8(p[0])), 10)
	case tensor.I16:
		return strconv.AppendInt(b, int64(int16(le.Uint16(p))), 10)
	case tensor.I32:
		return strconv.AppendInt(b, int64(int32(le.Uint32(p))), 10)
	case tensor.I64:
		return strconv.AppendInt(b, int64(le.Uint64(p)), 10)
	case tensor.F32:
		return appendFloat(b, float64(math.Float32frombits(le.Uint32(p))), 32)
	case tensor.F64:
		return appendFloat(b, math.Float64frombits(le.Uint64(p)), 64)
	case tensor.F8E4M3FN, tensor.F8E5M2:
		return appendFloat(b, float64(half.Float32(d, uint16(p[0]))), 32)
	}
	return appendFloat(b, float64(half.Float32(d, le.Uint16(p))), 32)
}

func appendFloat(b []byte, v float64, bits int) []byte {
	form := byte('f')
	switch abs := math.Abs(v); {
	case v != v:
		return append(b, "NaN"...)
	case math.IsInf(v, 1):
		return append(b, "Infinity"...)
	case math.IsInf(v, -1):
		return append(b, "-Infinity"...)
	case abs != 0 && (abs < 1e-6 || abs >= 1e21): // as encoding/json does
		form = 'e'
	}
	return strconv.AppendFloat(b, v, form, -1, bits)
}
