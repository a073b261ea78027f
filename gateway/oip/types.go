// SPDX-License-Identifier: Apache-2.0

package oip

import (
	"fmt"
	"strings"

	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

// DefaultGRPC is a gateway's default address for gRPC.
const DefaultGRPC = "127.0.0.1:8001"

// Element types as the protocol names them.
var typeNames = [...]string{
	tensor.Bool: "BOOL", tensor.U8: "UINT8", tensor.I8: "INT8", tensor.I16: "INT16", tensor.I32: "INT32",
	tensor.I64: "INT64", tensor.F16: "FP16", tensor.BF16: "BF16", tensor.F32: "FP32", tensor.F64: "FP64",
	tensor.Str: "BYTES",
}

// ConfigTypes are the element types as a ModelConfig has them.
var ConfigTypes = [...]DataType{
	tensor.Bool: DataType_TYPE_BOOL, tensor.U8: DataType_TYPE_UINT8, tensor.I8: DataType_TYPE_INT8,
	tensor.I16: DataType_TYPE_INT16, tensor.I32: DataType_TYPE_INT32, tensor.I64: DataType_TYPE_INT64,
	tensor.F16: DataType_TYPE_FP16, tensor.BF16: DataType_TYPE_BF16,
	tensor.F32: DataType_TYPE_FP32, tensor.F64: DataType_TYPE_FP64,
	tensor.Str: DataType_TYPE_STRING,
}

// TypeName returns the protocol's name of an element type.
func TypeName(d tensor.DType) string {
	if int(d) < len(typeNames) {
		return typeNames[d]
	}
	return "?"
}

// ParseType reads a type's name. The protocol has more types than a ring.
func ParseType(name string) (tensor.DType, error) {
	for d := tensor.Bool; int(d) < len(typeNames); d++ {
		if name == typeNames[d] {
			return d, nil
		}
	}
	switch name {
	case "UINT16", "UINT32", "UINT64":
		return 0, fmt.Errorf("%w: element type %s: a ring has %s", status.ErrDType, name,
			strings.Join(typeNames[tensor.Bool:], ", "))
	}
	return 0, fmt.Errorf("%w: element type %q is unknown", status.ErrDType, name)
}

// WireShape returns a tensor's shape for the protocol's metadata: -1 for rows and
// variable dimensions.
func WireShape(spec *tensor.Spec) []int64 {
	return append([]int64{-1}, RowShape(spec)...)
}

// RowShape returns the shape of a row, with -1 for variable dimensions.
func RowShape(spec *tensor.Spec) []int64 {
	row := WireRow(spec, spec.Shape)
	shape := make([]int64, len(row))
	for i, d := range row {
		shape[i] = int64(d)
	}
	for _, v := range spec.Variable {
		shape[v] = -1
	}
	return shape
}
