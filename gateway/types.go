// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"strings"

	"github.com/ringbatch/ringbatch/gateway/oip"
	"github.com/ringbatch/ringbatch/tensor"
)

// Element types as the protocol names them.
var typeNames = [...]string{
	tensor.Bool: "BOOL", tensor.U8: "UINT8", tensor.I8: "INT8", tensor.I16: "INT16", tensor.I32: "INT32",
	tensor.I64: "INT64", tensor.F16: "FP16", tensor.BF16: "BF16", tensor.F32: "FP32", tensor.F64: "FP64",
}

var configTypes = [...]oip.DataType{
	tensor.Bool: oip.DataType_TYPE_BOOL, tensor.U8: oip.DataType_TYPE_UINT8, tensor.I8: oip.DataType_TYPE_INT8,
	tensor.I16: oip.DataType_TYPE_INT16, tensor.I32: oip.DataType_TYPE_INT32, tensor.I64: oip.DataType_TYPE_INT64,
	tensor.F16: oip.DataType_TYPE_FP16, tensor.BF16: oip.DataType_TYPE_BF16,
	tensor.F32: oip.DataType_TYPE_FP32, tensor.F64: oip.DataType_TYPE_FP64,
}

// TypeName is what the protocol calls an element type.
func TypeName(d tensor.DType) string {
	if int(d) < len(typeNames) {
		return typeNames[d]
	}
	return "?"
}

// parseType reads a type's name. The protocol has more types than a ring.
func parseType[S []byte | string](name S) (tensor.DType, error) {
	for d := tensor.Bool; int(d) < len(typeNames); d++ {
		if string(name) == typeNames[d] {
			return d, nil
		}
	}
	switch string(name) {
	case "UINT16", "UINT32", "UINT64", "BYTES":
		return 0, badRequest("element type %s: a ring has %s; text and images can be sent as UINT8", string(name), strings.Join(typeNames[tensor.Bool:], ", "))
	}
	return 0, badRequest("element type %q is unknown", string(name))
}

// wireShape is a tensor's shape as the protocol's metadata has it: -1 for the
// rows and for what varies.
func wireShape(spec *tensor.Spec) []int64 {
	return append([]int64{-1}, rowShape(spec)...)
}

func rowShape(spec *tensor.Spec) []int64 {
	shape := make([]int64, len(spec.Shape))
	for i, d := range spec.Shape {
		shape[i] = int64(d)
	}
	for _, v := range spec.Variable {
		shape[v] = -1
	}
	return shape
}
