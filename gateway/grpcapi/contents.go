// SPDX-License-Identifier: Apache-2.0

package grpcapi

import (
	"encoding/binary"
	"math"

	"google.golang.org/protobuf/proto"

	"github.com/ringbatch/ringbatch/gateway/core"
	"github.com/ringbatch/ringbatch/gateway/oip"
	"github.com/ringbatch/ringbatch/tensor"
)

// readContents reads an input from the typed lists of a message, for callers that
// do not send raw bytes. The memory of the list and of the tensor counts as the
// caller's before it is used: small integers take one byte in the message.
func (c rpcCall) readContents(in *core.Input, encoded []byte) error {
	size := 2 * len(encoded)
	if in.DType != tensor.Bool && in.DType != tensor.F32 && in.DType != tensor.F64 { // varints
		size = 16 * len(encoded)
	}
	if size > core.SmallBuffer {
		if err := c.Take(size); err != nil {
			return err
		}
	}
	var lists oip.InferTensorContents
	if proto.Unmarshal(encoded, &lists) != nil {
		return oip.ErrMessage
	}
	lists.ProtoReflect().SetUnknown(nil) // a later version's
	out, fits := core.BytesSource{}, true
	le := binary.LittleEndian
	switch in.DType {
	case tensor.Bool:
		for _, v := range lists.BoolContents {
			out = append(out, 0)
			if v {
				out[len(out)-1] = 1
			}
		}
		lists.BoolContents = nil
	case tensor.U8:
		for _, v := range lists.UintContents {
			out, fits = append(out, byte(v)), fits && v <= math.MaxUint8
		}
		lists.UintContents = nil
	case tensor.I8, tensor.I16, tensor.I32:
		for _, v := range lists.IntContents {
			switch in.DType {
			case tensor.I8:
				out, fits = append(out, byte(v)), fits && v == int32(int8(v))
			case tensor.I16:
				out, fits = le.AppendUint16(out, uint16(v)), fits && v == int32(int16(v))
			default:
				out = le.AppendUint32(out, uint32(v))
			}
		}
		lists.IntContents = nil
	case tensor.I64:
		for _, v := range lists.Int64Contents {
			out = le.AppendUint64(out, uint64(v))
		}
		lists.Int64Contents = nil
	case tensor.F32:
		for _, v := range lists.Fp32Contents {
			out = le.AppendUint32(out, math.Float32bits(v))
		}
		lists.Fp32Contents = nil
	case tensor.F64:
		for _, v := range lists.Fp64Contents {
			out = le.AppendUint64(out, math.Float64bits(v))
		}
		lists.Fp64Contents = nil
	case tensor.Str:
		for _, v := range lists.BytesContents {
			out = append(le.AppendUint32(out, uint32(len(v))), v...)
		}
		lists.BytesContents = nil
	default:
		return core.BadRequest("input %q: %s has to come in raw_input_contents", in.Name, oip.TypeName(in.DType))
	}
	if !fits || proto.Size(&lists) > 0 { // the rest is of another type
		return core.BadRequest("input %q: the contents are not those of %s", in.Name, oip.TypeName(in.DType))
	}
	in.Src, in.Size = &out, len(out)
	return nil
}
