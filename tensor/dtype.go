// SPDX-License-Identifier: Apache-2.0

package tensor

import (
	"fmt"
	"strings"

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
	F8E4M3FN
	F8E5M2
)

// These are raw bits: ringbatch moves them but does not compute with them.
type (
	Float16      uint16
	BFloat16     uint16
	Float8E4M3FN uint8
	Float8E5M2   uint8
)

var dtypes = [...]struct {
	name, numpy string
	size        int
}{
	Bool: {"bool", "bool", 1}, U8: {"u8", "uint8", 1}, I8: {"i8", "int8", 1}, I16: {"i16", "int16", 2}, I32: {"i32", "int32", 4},
	I64: {"i64", "int64", 8}, F16: {"f16", "float16", 2}, BF16: {"bf16", "bfloat16", 2}, F32: {"f32", "float32", 4},
	F64: {"f64", "float64", 8}, Str: {"str", "str", 1},
	F8E4M3FN: {"f8e4m3fn", "float8_e4m3fn", 1}, F8E5M2: {"f8e5m2", "float8_e5m2", 1},
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
func (d DType) Valid() bool { return d >= Bool && int(d) < len(dtypes) }

// ParseDType reads a name as String writes it, or a name of NumPy.
func ParseDType(name string) (DType, error) {
	var have []string
	for d := Bool; d.Valid(); d++ {
		if dtypes[d].name == name || dtypes[d].numpy == name {
			return d, nil
		}
		have = append(have, dtypes[d].name)
	}
	return 0, fmt.Errorf("%w: dtype %q (have %s)", status.ErrInvalid, name, strings.Join(have, ", "))
}

// Element is a Go type of a tensor's elements.
type Element interface {
	bool | uint8 | int8 | int16 | int32 | int64 | Float16 | BFloat16 | float32 | float64 | Float8E4M3FN | Float8E5M2
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
	case Float8E4M3FN:
		return F8E4M3FN
	case Float8E5M2:
		return F8E5M2
	default:
		return F64
	}
}
