// SPDX-License-Identifier: Apache-2.0

package oip

import (
	"fmt"

	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

// Request is a ModelInferRequest as the transport received it.
type Request struct {
	Data mem.BufferSlice

	Model, Version, ID          []byte
	Inputs, Outputs, Parameters [][]byte // encoded
	Raw                         []Spans
	Copied                      int // bytes of the fields that did not lie in one piece
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
func (m *Request) Split() error {
	cur := cursor{parts: m.Data}
	for !cur.end() {
		field, kind := protowire.DecodeTag(cur.varint())
		if cur.bad || field < 1 {
			return ErrMessage
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
			return ErrMessage
		}
		n := cur.varint()
		if cur.bad || n > uint64(cur.left()) {
			return ErrMessage
		}
		switch field {
		case fieldRawInputs:
			if len(m.Raw) >= tensor.MaxTensors {
				return fmt.Errorf("%w: too many raw_input_contents", status.ErrInvalid)
			}
			m.Raw = append(m.Raw, cur.spans(int(n)))
		case fieldModel:
			m.Model = cur.bytes(int(n))
		case fieldVersion:
			m.Version = cur.bytes(int(n))
		case fieldID:
			m.ID = cur.bytes(int(n))
		case fieldParameters:
			m.Parameters = append(m.Parameters, cur.bytes(int(n)))
		case fieldInputs:
			m.Inputs = append(m.Inputs, cur.bytes(int(n)))
		case fieldOutputs:
			m.Outputs = append(m.Outputs, cur.bytes(int(n)))
		default:
			cur.spans(int(n)) // without a copy
		}
		if cur.bad || len(m.Inputs) > tensor.MaxTensors || len(m.Outputs) > tensor.MaxTensors || len(m.Parameters) > maxParameters {
			return ErrMessage
		}
	}
	if cur.bad { // cut off inside its last field
		return ErrMessage
	}
	m.Copied = cur.copied
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
	_ = s.ReadFull(out)
	return out
}

// spans gives the next n bytes as they lie.
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

// Spans is a piece of a gRPC message, wherever the transport has its parts.
type Spans struct {
	parts []mem.Buffer // the part in which it begins, and the following
	at    int          // where in the first of them
	size  int
}

// Size is how many bytes are left of it.
func (s *Spans) Size() int { return s.size }

// ErrShort cannot happen where sizes were checked; nothing is padded with rubbish.
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
