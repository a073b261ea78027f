// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"encoding/binary"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/ringbatch/ringbatch/gateway/oip"
	"github.com/ringbatch/ringbatch/tensor"
)

// readContents takes an input's elements from the typed lists of the message:
// the slow way, for callers that have no raw bytes. What it makes of them is
// counted first, and never larger than the shape says: a list of small numbers
// is many times as large in memory as in the message.
func (c rpcCall) readContents(in *input, encoded []byte) error {
	list, kind, ok := contentsOf(in.dtype)
	if !ok {
		return badRequest("input %q: %s has to come in raw_input_contents", in.name, oip.TypeName(in.dtype))
	}
	size, most := in.dtype.Size(), c.model.g.cfg.MaxMessageBytes
	for _, d := range in.shape {
		if d > 0 && size > most/d {
			return badRequest("input %q of shape %v takes more than %d bytes", in.name, in.shape, most)
		}
		size *= d
	}
	if size > smallBuffer {
		if err := c.take(size); err != nil {
			return err
		}
	}
	out := make(bytesSource, 0, size)
	wrong := badRequest("input %q: the contents are not those of %s", in.name, oip.TypeName(in.dtype))
	add := func(v uint64) error {
		if len(out) == size {
			return badRequest("input %q: more contents than its shape %v has", in.name, in.shape)
		}
		var fits bool
		if out, fits = appendElement(out, in.dtype, v); !fits {
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
	in.src, in.size = &out, len(out)
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
