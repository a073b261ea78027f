// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"github.com/ringbatch/ringbatch/gateway/oip"
	"github.com/ringbatch/ringbatch/internal/codec"
	"github.com/ringbatch/ringbatch/tensor"
)

// httpCall is a call in JSON, perhaps with tensors that follow it.
type httpCall struct{ *call }

// readJSON reads an inference request's JSON, which is the whole body or the
// head of a binary one. The tensors of a binary body follow in the order of
// the inputs: their source is body.
func (c httpCall) readJSON(text []byte, body *bodySource) (binary int, err error) {
	s := codec.NewScanner(text)
	s.Each(func(key []byte) {
		switch string(key) {
		case "id":
			c.setID(s, s.Text())
		case "parameters":
			c.readParameters(s)
		case "inputs":
			s.Items(func() { binary += c.readInput(s, body) })
		case "outputs":
			s.Items(func() { c.readOutput(s) })
		default:
			s.Skip()
		}
	})
	s.End()
	return binary, s.Err()
}

func (c httpCall) setID(s *codec.Scanner, id []byte) {
	if len(id) > maxIDBytes {
		s.Fail("an id that long")
		return
	}
	c.id = string(id)
}

func (c httpCall) readParameters(s *codec.Scanner) {
	s.Each(func(key []byte) {
		switch string(key) {
		case "priority":
			s.Check(c.setPriority(s.Integer()))
		case "timeout":
			s.Check(c.setTimeout(s.Integer()))
		case "binary_data_output":
			c.binary = s.Boolean()
		default:
			s.Skip()
		}
	})
}

// readInput gives the bytes that it has in the binary part of the body.
func (c httpCall) readInput(s *codec.Scanner, body *bodySource) (binary int) {
	if len(c.inputs) >= tensor.MaxTensors {
		s.Fail("too many inputs")
		return 0
	}
	in := c.addInput()
	var data []byte
	size, typeErr := int64(-1), error(nil)
	s.Each(func(key []byte) {
		switch string(key) {
		case "name":
			in.name = c.nameOf(s.Text())
		case "datatype":
			in.dtype, typeErr = oip.ParseType(string(s.Text()))
		case "shape":
			in.shape = in.shape[:0]
			s.Items(func() { in.shape = appendDim(s, in.shape, s.Integer()) })
		case "data":
			data = s.Skip()
		case "parameters":
			s.Each(func(key []byte) {
				if string(key) == "binary_data_size" {
					size = s.Integer()
				} else {
					readRegion(&in.region, s, key)
				}
			})
		default:
			s.Skip()
		}
	})
	ways := 0
	if data != nil {
		ways++
		in.src = jsonSource{codec.NewReader(data, in.dtype, in.shape)}
	}
	if size >= 0 {
		ways++
		in.src, in.size, binary = body, int(size), int(size)
	}
	if in.region.name != "" {
		ways++
		in.size = int(in.region.size)
	}
	switch {
	case typeErr != nil:
		s.Check(typeErr)
	case ways != 1:
		s.Check(badRequest("input %q needs its bytes in one way: data, binary_data_size, or shared_memory_region", in.name))
	case size > int64(c.model.g.cfg.MaxMessageBytes):
		s.Check(tooLarge(size, c.model.g.cfg.MaxMessageBytes))
	case size >= 0 && body == nil:
		s.Check(badRequest("input %q has a binary_data_size, but no header %s says where the JSON ends", in.name, headerLength))
	}
	return binary
}

func appendDim(s *codec.Scanner, shape []int, d int64) []int {
	if len(shape) > tensor.MaxRank || d < 0 || d > 1<<40 {
		s.Fail("no such shape")
		return shape
	}
	return append(shape, int(d))
}

func (c httpCall) readOutput(s *codec.Scanner) {
	if len(c.outputs) >= tensor.MaxTensors {
		s.Fail("too many outputs")
		return
	}
	o := c.addOutput()
	s.Each(func(key []byte) {
		switch string(key) {
		case "name":
			o.name = c.nameOf(s.Text())
		case "parameters":
			s.Each(func(key []byte) {
				switch string(key) {
				case "binary_data":
					o.form = formJSON
					if s.Boolean() {
						o.form = formBinary
					}
				case "classification":
					if s.Integer() > 0 {
						s.Check(errClassification)
					}
				default:
					readRegion(&o.region, s, key)
				}
			})
		default:
			s.Skip()
		}
	})
}

// readRegion reads one of the parameters that say where in shared memory a
// tensor lies, and steps over others.
func readRegion(u *regionUse, s *codec.Scanner, key []byte) {
	switch string(key) {
	case "shared_memory_region":
		u.name = string(s.Text())
	case "shared_memory_offset":
		u.offset = s.Integer()
	case "shared_memory_byte_size":
		u.size = s.Integer()
	default:
		s.Skip()
	}
}
