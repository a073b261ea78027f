// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"fmt"
	"math"
	"unicode/utf8"

	"google.golang.org/grpc/encoding"
	_ "google.golang.org/grpc/encoding/gzip" // callers may compress
	encproto "google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/ringbatch/ringbatch/internal/relaywire"
	"github.com/ringbatch/ringbatch/tensor"
)

// rpcCodec leaves the tensors of inference requests where the transport has put
// them, and takes those of answers from the slots. Everything else goes the
// usual way.
type rpcCodec struct{ usual encoding.CodecV2 }

func newCodec() rpcCodec { return rpcCodec{encoding.GetCodecV2(encproto.Name)} }

func (c rpcCodec) Name() string { return encproto.Name }

func (c rpcCodec) Unmarshal(data mem.BufferSlice, v any) error {
	if m, ok := v.(*message); ok {
		data.Ref()
		m.data = data
		return nil
	}
	return c.usual.Unmarshal(data, v)
}

func (c rpcCodec) Marshal(v any) (mem.BufferSlice, error) {
	if a, ok := v.(*rpcAnswer); ok {
		return a.marshal(), nil
	}
	return c.usual.Marshal(v)
}

// message is a ModelInferRequest as the transport received it.
type message struct {
	data mem.BufferSlice

	model, version []byte
	inputs         [][]byte // encoded
	outputs        [][]byte
	parameters     [][]byte
	id             []byte
	raw            []spans
	copied         int // bytes of the fields that did not lie in one piece
}

// free gives the transport's buffers back.
func (m *message) free() {
	m.data.Free()
	m.data = nil
	m.reset()
}

// reset forgets what split has found.
func (m *message) reset() {
	clear(m.inputs)
	clear(m.outputs)
	clear(m.parameters)
	clear(m.raw)
	*m = message{data: m.data, inputs: m.inputs[:0], outputs: m.outputs[:0], parameters: m.parameters[:0], raw: m.raw[:0]}
}

var errMessage = badRequest("the message is no ModelInferRequest")

// Field numbers of ModelInferRequest.
const (
	fieldModel      = 1
	fieldVersion    = 2
	fieldID         = 3
	fieldParameters = 4
	fieldInputs     = 5
	fieldOutputs    = 6
	fieldRawInputs  = 7
)

// split finds the message's fields.
func (m *message) split() error {
	cur := cursor{parts: m.data}
	for !cur.end() {
		field, kind := protowire.DecodeTag(cur.varint())
		if cur.bad || field < 1 {
			return errMessage
		}
		switch kind {
		case protowire.VarintType:
			cur.varint()
			continue
		case protowire.Fixed32Type:
			cur.bytes(4)
			continue
		case protowire.Fixed64Type:
			cur.bytes(8)
			continue
		case protowire.BytesType:
		default:
			return errMessage
		}
		n := cur.varint()
		if cur.bad || n > uint64(cur.left()) {
			return errMessage
		}
		switch field {
		case fieldRawInputs:
			if len(m.raw) >= tensor.MaxTensors {
				return badRequest("too many raw_input_contents")
			}
			m.raw = append(m.raw, cur.spans(int(n)))
		case fieldModel:
			m.model = cur.bytes(int(n))
		case fieldVersion:
			m.version = cur.bytes(int(n))
		case fieldID:
			m.id = cur.bytes(int(n))
		case fieldParameters:
			m.parameters = append(m.parameters, cur.bytes(int(n)))
		case fieldInputs:
			m.inputs = append(m.inputs, cur.bytes(int(n)))
		case fieldOutputs:
			m.outputs = append(m.outputs, cur.bytes(int(n)))
		default:
			cur.spans(int(n)) // without a copy
		}
		if cur.bad || len(m.inputs) > tensor.MaxTensors || len(m.outputs) > tensor.MaxTensors || len(m.parameters) > maxParameters {
			return errMessage
		}
	}
	if cur.bad { // cut off inside its last field
		return errMessage
	}
	m.copied = cur.copied
	return nil
}

const maxParameters = 1024

// cursor walks over a message that lies in several parts.
type cursor struct {
	parts mem.BufferSlice
	at    int // in parts[0]
	bad   bool

	copied int
}

// settle steps to the next part that has something left.
func (c *cursor) settle() {
	for len(c.parts) > 0 && c.at == c.parts[0].Len() {
		c.parts, c.at = c.parts[1:], 0
	}
}

func (c *cursor) end() bool {
	c.settle()
	return len(c.parts) == 0 || c.bad
}

func (c *cursor) left() int { return c.parts.Len() - c.at }

func (c *cursor) varint() (v uint64) {
	for shift := 0; shift < 64; shift += 7 {
		if c.settle(); len(c.parts) == 0 {
			break
		}
		b := c.parts[0].ReadOnlyData()[c.at]
		c.at++
		v |= uint64(b&0x7f) << shift
		if b < 0x80 {
			if shift == 63 && b > 1 {
				break
			}
			return v
		}
	}
	c.bad = true
	return 0
}

// bytes gives the next n bytes: in place, unless they cross into another part.
func (c *cursor) bytes(n int) []byte {
	if n > c.left() {
		c.bad = true
		return nil
	}
	if n == 0 {
		return nil
	}
	c.settle()
	if p := c.parts[0].ReadOnlyData(); len(p)-c.at >= n {
		c.at += n
		return p[c.at-n : c.at : c.at]
	}
	out := make([]byte, n)
	c.copied += n
	s := c.spans(n)
	_ = s.readFull(out)
	return out
}

// spans gives the next n bytes as they lie.
func (c *cursor) spans(n int) spans {
	c.settle()
	s := spans{parts: c.parts, at: c.at, size: n}
	for n > 0 {
		step := min(n, c.parts[0].Len()-c.at)
		n -= step
		c.at += step
		c.settle()
	}
	return s
}

// fields walks over a small message that lies in one piece.
func fields(b []byte, each func(field protowire.Number, kind protowire.Type, number uint64, bytes []byte) error) error {
	for len(b) > 0 {
		field, kind, n := protowire.ConsumeTag(b)
		if n < 0 {
			return errMessage
		}
		b = b[n:]
		var number uint64
		var bytes []byte
		switch kind {
		case protowire.VarintType:
			number, n = protowire.ConsumeVarint(b)
		case protowire.BytesType:
			bytes, n = protowire.ConsumeBytes(b)
		case protowire.Fixed32Type, protowire.Fixed64Type:
			number, n = consumeNumber(kind, b)
		default:
			n = protowire.ConsumeFieldValue(field, kind, b)
		}
		if n < 0 {
			return errMessage
		}
		if err := each(field, kind, number, bytes); err != nil {
			return err
		}
		b = b[n:]
	}
	return nil
}

// parameter is one entry of a map<string, InferParameter>.
type parameter struct {
	key     []byte
	text    []byte // string_param
	number  int64  // int64_param or uint64_param
	isOther bool   // what it is, is no whole number
}

func readParameter(b []byte) (p parameter, err error) {
	err = fields(b, func(field protowire.Number, _ protowire.Type, _ uint64, bytes []byte) error {
		switch field {
		case 1:
			p.key = bytes
		case 2:
			return fields(bytes, func(field protowire.Number, _ protowire.Type, number uint64, bytes []byte) error {
				switch field {
				case 2:
					p.number, p.isOther = int64(number), false
				case 5:
					p.number, p.isOther = int64(min(number, math.MaxInt64)), false
				case 1, 3, 4: // bool, string, double
					p.text, p.isOther = bytes, true
				}
				return nil
			})
		}
		return nil
	})
	return p, err
}

func (p *parameter) region(u *regionUse) {
	switch string(p.key) {
	case "shared_memory_region":
		u.name = string(p.text)
	case "shared_memory_offset":
		u.offset = p.number
	case "shared_memory_byte_size":
		u.size = p.number
	}
}

// readMessage is readJSON for gRPC. The message has been split, and stays
// until the sources have been read.
func (c *call) readMessage(m *message) error {
	if len(m.id) > maxIDBytes || !utf8.Valid(m.id) {
		return badRequest("an id of %d bytes; it is to be text of at most %d", len(m.id), maxIDBytes)
	}
	c.id = string(m.id)
	if m.copied > smallBuffer {
		if err := c.take(m.copied); err != nil {
			return err
		}
	}
	for _, b := range m.parameters {
		p, err := readParameter(b)
		if err != nil {
			return err
		}
		switch key := string(p.key); {
		case key == relaywire.Requests:
			err = c.readRelayed(p.text)
		case key != "priority" && key != "timeout": // others may be anything
		case p.isOther:
			err = badRequest("parameter %q is to be a whole number", key)
		case key == "priority":
			err = c.setPriority(p.number)
		default:
			err = c.setTimeout(p.number)
		}
		if err != nil {
			return err
		}
	}
	raw := m.raw
	for _, b := range m.inputs {
		in, contents, err := c.readInputMessage(b)
		if err != nil {
			return err
		}
		switch {
		case in.region.name != "":
			if contents != nil {
				return badRequest("input %q has contents and lies in shared memory too", in.name)
			}
			in.size = int(in.region.size)
		case contents != nil:
			if len(m.raw) > 0 {
				return badRequest("input %q has contents, and the request raw_input_contents; it is to be one of them", in.name)
			}
			if err := c.readContents(in, contents); err != nil {
				return err
			}
		case len(raw) == 0:
			return badRequest("raw_input_contents has %d entries, too few for the inputs", len(m.raw))
		default:
			in.src, in.size = &raw[0], raw[0].size
			raw = raw[1:]
		}
	}
	if len(raw) > 0 {
		return badRequest("raw_input_contents has %d entries, more than the inputs", len(m.raw))
	}
	for _, b := range m.outputs {
		if err := c.readOutputMessage(b); err != nil {
			return err
		}
	}
	return nil
}

func (c *call) readInputMessage(b []byte) (in *input, contents []byte, err error) {
	in = c.addInput()
	has := false
	err = fields(b, func(field protowire.Number, kind protowire.Type, number uint64, bytes []byte) (err error) {
		switch field {
		case 1:
			in.name = c.nameOf(bytes)
		case 2:
			in.dtype, err = parseType(bytes)
		case 3:
			if kind == protowire.VarintType {
				return in.addDim(number)
			}
			for len(bytes) > 0 {
				v, n := protowire.ConsumeVarint(bytes)
				if n < 0 {
					return errMessage
				}
				bytes = bytes[n:]
				if err := in.addDim(v); err != nil {
					return err
				}
			}
		case 4:
			p, err := readParameter(bytes)
			if err != nil {
				return err
			}
			p.region(&in.region)
		case 5:
			contents, has = bytes, true
		}
		return err
	})
	if has && contents == nil {
		contents = []byte{}
	}
	return in, contents, err
}

func (in *input) addDim(v uint64) error {
	if len(in.shape) > tensor.MaxRank || v > 1<<40 {
		return fmt.Errorf("input %q: %w", in.name, badRequest("no such shape"))
	}
	in.shape = append(in.shape, int(v))
	return nil
}

func (c *call) readOutputMessage(b []byte) error {
	o := c.addOutput()
	return fields(b, func(field protowire.Number, _ protowire.Type, _ uint64, bytes []byte) error {
		switch field {
		case 1:
			o.name = c.nameOf(bytes)
		case 2:
			p, err := readParameter(bytes)
			if err != nil {
				return err
			}
			if string(p.key) == "classification" && p.number > 0 {
				return errClassification
			}
			p.region(&o.region)
		}
		return nil
	})
}
