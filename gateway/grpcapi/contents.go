// SPDX-License-Identifier: Apache-2.0

package grpcapi

import (
	"encoding/binary"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/ringbatch/ringbatch/gateway/core"
	"github.com/ringbatch/ringbatch/gateway/oip"
	"github.com/ringbatch/ringbatch/tensor"
)

// readContents takes an input's elements from the typed lists of the message:
// the slow way, for callers that have no raw bytes. What it makes of them is
// counted first, and never larger than the shape says: a list of small numbers
// is many times as large in memory as in the message.
func (c rpcCall) readContents(in *core.Input, encoded []byte) error {
	list, kind, ok := contentsOf(in.DType)
	if !ok {
		return core.BadRequest("input %q: %s has to come in raw_input_contents", in.Name, oip.TypeName(in.DType))
	}
	size, most := in.DType.Size(), c.Model.G.Cfg.MaxMessageBytes
	for _, d := range in.Shape {
		if d > 0 && size > most/d {
			return core.BadRequest("input %q of shape %v takes more than %d bytes", in.Name, in.Shape, most)
		}
		size *= d
	}
	if size > core.SmallBuffer {
		if err := c.Take(size); err != nil {
			return err
		}
	}
	out := make(core.BytesSource, 0, size)
	wrong := core.BadRequest("input %q: the contents are not those of %s", in.Name, oip.TypeName(in.DType))
	add := func(v uint64) error {
		if len(out) == size {
			return core.BadRequest("input %q: more contents than its shape %v has", in.Name, in.Shape)
		}
		var fits bool
		if out, fits = appendElement(out, in.DType, v); !fits {
			return wrong
		}
		return nil
	}
	err := oip.EachField(encoded, func(field protowire.Number, got protowire.Type, number uint64, packed []byte) error {
		switch {
		case field != list && field <= lastContents:
			if got == protowire.BytesType && len(packed) == 0 && field < lastContents {
				return nil // an empty list
			}
			return wrong
		case field != list: // of a later version
			return nil
		case got == kind:
			return add(number)
		case got != protowire.BytesType:
			return oip.ErrMessage
		}
		for len(packed) > 0 {
			v, n := oip.ConsumeNumber(kind, packed)
			if n < 0 {
				return oip.ErrMessage
			}
			packed = packed[n:]
			if err := add(v); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	in.Src, in.Size = &out, len(out)
	return nil
}

const lastContents = 8 // bytes_contents

// contentsOf is the field of InferTensorContents for an element type, and how
// its elements are written.
func contentsOf(d tensor.DType) (protowire.Number, protowire.Type, bool) {
	switch d {
	case tensor.Bool:
		return 1, protowire.VarintType, true
	case tensor.I8, tensor.I16, tensor.I32:
		return 2, protowire.VarintType, true
	case tensor.I64:
		return 3, protowire.VarintType, true
	case tensor.U8:
		return 4, protowire.VarintType, true
	case tensor.F32:
		return 6, protowire.Fixed32Type, true
	case tensor.F64:
		return 7, protowire.Fixed64Type, true
	}
	return 0, 0, false
}

// appendElement writes a number as the ring has it; false if it does not fit.
func appendElement(out []byte, d tensor.DType, v uint64) ([]byte, bool) {
	le := binary.LittleEndian
	switch n := int32(v); d {
	case tensor.Bool:
		if v != 0 {
			v = 1
		}
		return append(out, byte(v)), true
	case tensor.U8:
		return append(out, byte(v)), v == uint64(byte(v))
	case tensor.I8:
		return append(out, byte(n)), n == int32(int8(n))
	case tensor.I16:
		return le.AppendUint16(out, uint16(n)), n == int32(int16(n))
	case tensor.I32, tensor.F32:
		return le.AppendUint32(out, uint32(v)), true
	}
	return le.AppendUint64(out, v), true
}
