// SPDX-License-Identifier: Apache-2.0

package oip

import (
	"fmt"

	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

// Request is a ModelInferRequest as the transport received it.
type Request struct {
	Data mem.BufferSlice

	Model, Version, ID          []byte
	Inputs, Outputs, Parameters [][]byte // encoded
	Raw                         []Spans
	Copied                      int // bytes of fields that crossed into another buffer
}

// Receive keeps the transport's buffers until Free.
func (m *Request) Receive(data mem.BufferSlice) { m.Data = data }

// Free gives the transport's buffers back.
func (m *Request) Free() {
	m.Data.Free()
	m.Data = nil
	m.Reset()
}

// Reset forgets what Split has found.
func (m *Request) Reset() {
	clear(m.Inputs)
	clear(m.Outputs)
	clear(m.Parameters)
	clear(m.Raw)
	*m = Request{Data: m.Data, Inputs: m.Inputs[:0], Outputs: m.Outputs[:0], Parameters: m.Parameters[:0], Raw: m.Raw[:0]}
}

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

// Split finds the message's fields.
func (m *Request) Split() (err error) {
	m.Copied, err = eachBytesField(m.Data, func(field protowire.Number, n int, c *cursor) error {
		switch field {
		case fieldRawInputs:
			if len(m.Raw) >= tensor.MaxTensors {
				return fmt.Errorf("%w: too many raw_input_contents", status.ErrInvalid)
			}
			m.Raw = append(m.Raw, c.spans(n))
		case fieldModel:
			m.Model = c.bytes(n)
		case fieldVersion:
			m.Version = c.bytes(n)
		case fieldID:
			m.ID = c.bytes(n)
		case fieldParameters:
			m.Parameters = append(m.Parameters, c.bytes(n))
		case fieldInputs:
			m.Inputs = append(m.Inputs, c.bytes(n))
		case fieldOutputs:
			m.Outputs = append(m.Outputs, c.bytes(n))
		default:
			c.spans(n) // without a copy
		}
		if len(m.Inputs) > tensor.MaxTensors || len(m.Outputs) > tensor.MaxTensors || len(m.Parameters) > maxParameters {
			return ErrMessage
		}
		return nil
	})
	return err
}

// eachBytesField calls each for the fields of a message that have a length, and
// skips the others. each consumes n bytes of the cursor. It returns how many bytes
// were copied because they crossed into another part.
func eachBytesField(data mem.BufferSlice, each func(field protowire.Number, n int, c *cursor) error) (copied int, err error) {
	c := &cursor{parts: data}
	for !c.end() {
		field, kind := protowire.DecodeTag(c.varint())
		if c.bad || field < 1 {
			return 0, ErrMessage
		}
		switch kind {
		case protowire.VarintType:
			c.varint()
		case protowire.Fixed32Type:
			c.bytes(4)
		case protowire.Fixed64Type:
			c.bytes(8)
		case protowire.BytesType:
			n := c.varint()
			if c.bad || n > uint64(c.left()) {
				return 0, ErrMessage
			}
			if err := each(field, int(n), c); err != nil {
				return 0, err
			}
		default:
			return 0, ErrMessage
		}
	}
	if c.bad { // cut off inside a field
		return 0, ErrMessage
	}
	return c.copied, nil
}

// Response is a ModelInferResponse as the transport received it.
type Response struct {
	Meta ModelInferResponse // all but the raw contents
	Raw  []Spans
	data mem.BufferSlice
}

// Receive keeps the transport's buffers until Free.
func (m *Response) Receive(data mem.BufferSlice) { m.data = data }

// Free gives the transport's buffers back.
func (m *Response) Free() {
	m.data.Free()
	m.data = nil
}

// MaxMetaBytes bounds a response without its tensors.
const MaxMetaBytes = 1 << 20

// Split finds the raw contents, and decodes the rest.
func (m *Response) Split() error {
	const rawOutputs = 6
	var meta []byte
	_, err := eachBytesField(m.data, func(field protowire.Number, n int, c *cursor) error {
		switch {
		case field == rawOutputs && len(m.Raw) >= tensor.MaxTensors:
			return ErrMessage
		case field == rawOutputs:
			m.Raw = append(m.Raw, c.spans(n))
		case len(meta)+n > MaxMetaBytes:
			return fmt.Errorf("%w: more than %d bytes beside its tensors", ErrMessage, MaxMetaBytes)
		default:
			meta = append(AppendSize(meta, field, n), c.bytes(n)...)
		}
		return nil
	})
	if err != nil {
		return err
	}
	if proto.Unmarshal(meta, &m.Meta) != nil {
		return ErrMessage
	}
	return nil
}

const maxParameters = 1024

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

// bytes returns the next n bytes: in place, unless they cross into another part.
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
	_ = s.ReadFull(out)
	return out
}

// spans returns the next n bytes without a copy.
func (c *cursor) spans(n int) Spans {
	c.settle()
	s := Spans{parts: c.parts, at: c.at, size: n}
	for n > 0 {
		step := min(n, c.parts[0].Len()-c.at)
		n -= step
		c.at += step
		c.settle()
	}
	return s
}

// Spans is a piece of a gRPC message in the transport's buffers.
type Spans struct {
	parts []mem.Buffer
	at    int // in parts[0]
	size  int
}

// Size returns how many bytes are left.
func (s *Spans) Size() int { return s.size }

// ErrShort is a source with too few bytes for a checked shape: a fault of ours.
var ErrShort = fmt.Errorf("%w: fewer bytes than the shape needs", status.ErrSize)

// ReadFull reads the next bytes.
func (s *Spans) ReadFull(p []byte) error {
	if len(p) > s.size {
		return ErrShort
	}
	s.size -= len(p)
	for len(p) > 0 {
		part := s.parts[0].ReadOnlyData()
		n := copy(p, part[s.at:])
		p = p[n:]
		if s.at += n; s.at == len(part) {
			s.parts, s.at = s.parts[1:], 0
		}
	}
	return nil
}
