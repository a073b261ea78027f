// SPDX-License-Identifier: Apache-2.0

package httpapi

import (
	"strconv"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/ringbatch/ringbatch/gateway/core"
	"github.com/ringbatch/ringbatch/gateway/oip"
	"github.com/ringbatch/ringbatch/internal/codec"
	"github.com/ringbatch/ringbatch/tensor"
)

// appendAnswer writes the JSON of an answer, and returns the size of the tensors
// that follow it.
func (c httpCall) appendAnswer(b []byte) (_ []byte, binary int) {
	b = append(b, '{')
	if c.ID != "" {
		b = append(codec.AppendString(append(b, `"id":`...), c.ID), ',')
	}
	b = codec.AppendString(append(b, `"model_name":`...), c.ModelName())
	b = codec.AppendString(append(b, `,"model_version":`...), c.ModelVersion())
	if v := c.WeightsVersion(); v > 0 {
		b = append(strconv.AppendUint(append(b, `,"parameters":{"weights_version":`...), v, 10), '}')
	}
	b = append(b, `,"outputs":[`...)
	for i := range c.Outputs {
		o := &c.Outputs[i]
		if i > 0 {
			b = append(b, ',')
		}
		b = codec.AppendString(append(b, `{"name":`...), o.Name)
		b = append(append(b, `,"datatype":"`...), oip.TypeName(o.DType)...)
		b = append(b, `","shape":[`...)
		for j, d := range o.Shape {
			if j > 0 {
				b = append(b, ',')
			}
			b = strconv.AppendInt(b, int64(d), 10)
		}
		b = append(b, ']')
		switch {
		case o.Region != nil: // load tools want no parameters here
		case c.isBinary(o):
			b = strconv.AppendInt(append(b, `,"parameters":{"binary_data_size":`...), int64(o.Size), 10)
			b = append(b, '}')
			binary += o.Size
		default:
			b = appendData(append(b, `,"data":`...), o)
		}
		b = append(b, '}')
	}
	return append(b, ']', '}'), binary
}

func (c httpCall) isBinary(o *core.Output) bool {
	return o.Form == core.FormBinary || o.Form == core.FormDefault && c.Binary
}

func (c httpCall) mostJSONBytes() int {
	n := 0
	for i := range c.Outputs {
		if o := &c.Outputs[i]; !c.isBinary(o) {
			n += o.Size / o.DType.Size() * codec.MaxJSONBytes(o.DType)
		}
	}
	return n
}

func appendData(b []byte, o *core.Output) []byte {
	b = append(b, '[')
	if o.DType == tensor.Str {
		comma := false
		for _, p := range o.Parts {
			oip.Texts(p, func(text []byte) {
				if comma {
					b = append(b, ',')
				}
				b, comma = codec.AppendString(b, string(text)), true
			})
		}
		return append(b, ']')
	}
	for i, p := range o.Parts {
		if i > 0 && len(p) > 0 {
			b = append(b, ',')
		}
		b = codec.AppendJSON(b, o.DType, p, false)
	}
	return append(b, ']')
}

// appendMessage writes a message of the protocol as Triton writes it over
// HTTP: every field, numbers as numbers, enumerations by name.
func appendMessage(b []byte, m proto.Message) []byte {
	return appendReflected(b, m.ProtoReflect())
}

func appendReflected(b []byte, m protoreflect.Message) []byte {
	b = append(b, '{')
	fields := m.Descriptor().Fields()
	first := true
	for i := range fields.Len() {
		f := fields.Get(i)
		if f.Kind() == protoreflect.MessageKind && !f.IsList() && !m.Has(f) {
			continue
		}
		if !first {
			b = append(b, ',')
		}
		first = false
		b = append(codec.AppendString(b, string(f.Name())), ':')
		v := m.Get(f)
		if !f.IsList() {
			b = appendValue(b, f, v)
			continue
		}
		b = append(b, '[')
		for j := range v.List().Len() {
			if j > 0 {
				b = append(b, ',')
			}
			b = appendValue(b, f, v.List().Get(j))
		}
		b = append(b, ']')
	}
	return append(b, '}')
}

func appendValue(b []byte, f protoreflect.FieldDescriptor, v protoreflect.Value) []byte {
	switch f.Kind() {
	case protoreflect.MessageKind:
		return appendReflected(b, v.Message())
	case protoreflect.EnumKind:
		return codec.AppendString(b, string(f.Enum().Values().ByNumber(v.Enum()).Name()))
	case protoreflect.StringKind:
		return codec.AppendString(b, v.String())
	case protoreflect.BoolKind:
		return strconv.AppendBool(b, v.Bool())
	case protoreflect.Uint64Kind:
		return strconv.AppendUint(b, v.Uint(), 10)
	}
	return strconv.AppendInt(b, v.Int(), 10)
}
