// SPDX-License-Identifier: Apache-2.0

package tensor

import (
	"fmt"

	"github.com/ringbatch/ringbatch/status"
)

// DType is a tensor's element type.
type DType uint8

const (
	Bool DType = iota + 1
	U8
	I8
	I16
	I32
	I64
	F16
	BF16
	F32
	F64
	Str // UTF-8: see PutText
)

// Float16 and BFloat16 are raw bits: ringbatch moves them but does not compute with them.
type (
	Float16  uint16
	BFloat16 uint16
)

var dtypes = [...]struct {
	name, numpy string
	size        int
}{
	Bool: {"bool", "bool", 1}, U8: {"u8", "uint8", 1}, I8: {"i8", "int8", 1}, I16: {"i16", "int16", 2}, I32: {"i32", "int32", 4},
	I64: {"i64", "int64", 8}, F16: {"f16", "float16", 2}, BF16: {"bf16", "bfloat16", 2}, F32: {"f32", "float32", 4},
	F64: {"f64", "float64", 8}, Str: {"str", "str", 1},
}

// Size is the size of one element in bytes; of a str 1, a byte.
func (d DType) Size() int { return dtypes[d].size }

func (d DType) String() string {
	if d.Valid() {
		return dtypes[d].name
	}
	return fmt.Sprintf("dtype(%d)", uint8(d))
}

// Valid reports whether d is one of these types.
func (d DType) Valid() bool { return d >= Bool && d <= Str }

// ParseDType reads a name as String writes it, or a name of NumPy.
func ParseDType(name string) (DType, error) {
	for d := Bool; d <= Str; d++ {
		if dtypes[d].name == name || dtypes[d].numpy == name {
			return d, nil
		}
	}
	return 0, fmt.Errorf("%w: dtype %q (have bool, u8, i8, i16, i32, i64, f16, bf16, f32, f64, str)", status.ErrInvalid, name)
}

// Element is a Go type of a tensor's elements.
type Element interface {
	bool | uint8 | int8 | int16 | int32 | int64 | Float16 | BFloat16 | float32 | float64
}

// DTypeOf is the DType of the Go type T.
func DTypeOf[T Element]() DType {
	var z T
	switch any(z).(type) {
	case bool:
		return Bool
	case uint8:
		return U8
	case int8:
		return I8
	case int16:
		return I16
	case int32:
		return I32
	case int64:
		return I64
	case Float16:
		return F16
	case BFloat16:
		return BF16
	case float32:
		return F32
	default:
		return F64
	}
}
