// SPDX-License-Identifier: Apache-2.0

package oip

import (
	"fmt"
	"math"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

// ErrMessage is a message that breaks the protocol.
var ErrMessage = fmt.Errorf("%w: the message is none of the protocol's", status.ErrInvalid)

// EachField calls each for the fields of a small message.
func EachField(b []byte, each func(field protowire.Number, kind protowire.Type, number uint64, bytes []byte) error) error {
	for len(b) > 0 {
		field, kind, n := protowire.ConsumeTag(b)
		if n < 0 {
			return ErrMessage
		}
		b = b[n:]
		var number uint64
		var bytes []byte
		switch kind {
		case protowire.VarintType, protowire.Fixed32Type, protowire.Fixed64Type:
			number, n = ConsumeNumber(kind, b)
		case protowire.BytesType:
			bytes, n = protowire.ConsumeBytes(b)
		default:
			n = protowire.ConsumeFieldValue(field, kind, b)
		}
		if n < 0 {
			return ErrMessage
		}
		if err := each(field, kind, number, bytes); err != nil {
			return err
		}
		b = b[n:]
	}
	return nil
}

// ConsumeNumber reads a number of that kind, and returns its length; negative: an
// error.
func ConsumeNumber(kind protowire.Type, b []byte) (uint64, int) {
	switch kind {
	case protowire.Fixed32Type:
		v, n := protowire.ConsumeFixed32(b)
		return uint64(v), n
	case protowire.Fixed64Type:
		return protowire.ConsumeFixed64(b)
	}
	return protowire.ConsumeVarint(b)
}

// Parameter is one entry of a map<string, InferParameter>.
type Parameter struct {
	Key     []byte
	Text    []byte // string_param
	Number  int64  // int64_param or uint64_param
	IsOther bool   // not a whole number

	Choice protowire.Number // which field of InferParameter
	Bits   uint64           // of a whole number or a bool
}

// Values of Parameter.Choice.
const (
	ChoiceBool   protowire.Number = 1
	ChoiceInt    protowire.Number = 2
	ChoiceString protowire.Number = 3
	ChoiceUint   protowire.Number = 5
)

// ReadParameter decodes an entry.
func ReadParameter(b []byte) (p Parameter, err error) {
	err = EachField(b, func(field protowire.Number, _ protowire.Type, _ uint64, bytes []byte) error {
		switch field {
		case 1:
			p.Key = bytes
		case 2:
			return EachField(bytes, func(field protowire.Number, _ protowire.Type, number uint64, bytes []byte) error {
				p.Choice, p.Bits = field, number
				switch field {
				case ChoiceInt:
					p.Number, p.IsOther = int64(number), false
				case ChoiceUint:
					p.Number, p.IsOther = int64(min(number, math.MaxInt64)), false
				case 1, 3, 4: // bool, string, double
					p.Text, p.IsOther = bytes, true
				}
				return nil
			})
		}
		return nil
	})
	return p, err
}

const parametersField = 4

// AppendText appends a text parameter of a request or response.
func AppendText(b []byte, key string, text []byte) []byte {
	return appendParameter(b, key, protowire.AppendBytes(protowire.AppendTag(nil, 3, protowire.BytesType), text))
}

// AppendNumber appends a whole number as a parameter of a request or response.
func AppendNumber(b []byte, key string, n uint64) []byte {
	return appendParameter(b, key, protowire.AppendVarint(protowire.AppendTag(nil, 2, protowire.VarintType), n))
}

// AppendBool appends a bool as a parameter of a request or response.
func AppendBool(b []byte, key string, value bool) []byte {
	return appendParameter(b, key, protowire.AppendVarint(protowire.AppendTag(nil, ChoiceBool, protowire.VarintType), protowire.EncodeBool(value)))
}

func appendParameter(b []byte, key string, value []byte) []byte {
	entry := AppendString(nil, 1, key)
	entry = protowire.AppendBytes(protowire.AppendTag(entry, 2, protowire.BytesType), value)
	return protowire.AppendBytes(protowire.AppendTag(b, parametersField, protowire.BytesType), entry)
}

// AppendString appends a string field.
func AppendString(b []byte, field protowire.Number, s string) []byte {
	return protowire.AppendString(protowire.AppendTag(b, field, protowire.BytesType), s)
}

// AppendSize begins a field of n bytes.
func AppendSize(b []byte, field protowire.Number, n int) []byte {
	return protowire.AppendVarint(protowire.AppendTag(b, field, protowire.BytesType), uint64(n))
}

// tensorField of a ModelInferRequest, and of its response.
const tensorField = 5

// AppendTensor appends a request's input or a response's output without contents.
func AppendTensor(b []byte, name string, d tensor.DType, shape ...int) []byte {
	dims := 0
	for _, n := range shape {
		dims += protowire.SizeVarint(uint64(n))
	}
	datatype := TypeName(d)
	size := 3 + protowire.SizeBytes(len(name)) + protowire.SizeBytes(len(datatype)) + protowire.SizeBytes(dims)
	b = AppendString(AppendString(AppendSize(b, tensorField, size), 1, name), 2, datatype)
	b = AppendSize(b, 3, dims)
	for _, n := range shape {
		b = protowire.AppendVarint(b, uint64(n))
	}
	return b
}
