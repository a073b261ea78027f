package gateway

import (
	"encoding/binary"
	"math"

	"google.golang.org/protobuf/proto"

	"github.com/ringbatch/ringbatch/gateway/oip"
	"github.com/ringbatch/ringbatch/tensor"
)

// readContents takes an input's elements from the typed lists of the message:
// the slow way, for callers that have no raw bytes.
func (in *input) readContents(encoded []byte) error {
	var c oip.InferTensorContents
	if proto.Unmarshal(encoded, &c) != nil {
		return errMessage
	}
	wrong := badRequest("input %q: the contents are not those of %s", in.name, TypeName(in.dtype))
	le := binary.LittleEndian
	var out bytesSource
	n := 0
	switch in.dtype {
	case tensor.Bool:
		n = len(c.BoolContents)
		for _, v := range c.BoolContents {
			b := byte(0)
			if v {
				b = 1
			}
			out = append(out, b)
		}
	case tensor.U8:
		n = len(c.UintContents)
		for _, v := range c.UintContents {
			if v > math.MaxUint8 {
				return wrong
			}
			out = append(out, byte(v))
		}
	case tensor.I8, tensor.I16, tensor.I32:
		n = len(c.IntContents)
		for _, v := range c.IntContents {
			switch {
			case in.dtype == tensor.I8 && v == int32(int8(v)):
				out = append(out, byte(v))
			case in.dtype == tensor.I16 && v == int32(int16(v)):
				out = le.AppendUint16(out, uint16(v))
			case in.dtype == tensor.I32:
				out = le.AppendUint32(out, uint32(v))
			default:
				return wrong
			}
		}
	case tensor.I64:
		n = len(c.Int64Contents)
		for _, v := range c.Int64Contents {
			out = le.AppendUint64(out, uint64(v))
		}
	case tensor.F32:
		n = len(c.Fp32Contents)
		for _, v := range c.Fp32Contents {
			out = le.AppendUint32(out, math.Float32bits(v))
		}
	case tensor.F64:
		n = len(c.Fp64Contents)
		for _, v := range c.Fp64Contents {
			out = le.AppendUint64(out, math.Float64bits(v))
		}
	default:
		return badRequest("input %q: %s has to come in raw_input_contents", in.name, TypeName(in.dtype))
	}
	all := len(c.BoolContents) + len(c.UintContents) + len(c.IntContents) + len(c.Int64Contents) + len(c.Uint64Contents) + len(c.Fp32Contents) + len(c.Fp64Contents) + len(c.BytesContents)
	if all != n {
		return wrong
	}
	in.src, in.size = &out, len(out)
	return nil
}
