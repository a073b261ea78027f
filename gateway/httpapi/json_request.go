// SPDX-License-Identifier: Apache-2.0

package httpapi

import (
	"strconv"

	"github.com/ringbatch/ringbatch/gateway/core"
	"github.com/ringbatch/ringbatch/gateway/oip"
	"github.com/ringbatch/ringbatch/internal/codec"
	"github.com/ringbatch/ringbatch/tensor"
)

type httpCall struct{ *core.Call }

// readJSON reads the JSON of an inference request: the whole body, or the head of a
// binary one, whose tensors follow in the order of the inputs.
func (c httpCall) readJSON(text []byte, body *core.BodySource) (binary int, err error) {
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
	if len(id) > core.MaxIDBytes {
		s.Fail("an id that long")
		return
	}
	c.ID = string(id)
}

func (c httpCall) readParameters(s *codec.Scanner) {
	s.Each(func(key []byte) { c.readParameter(s, key) })
}

// readParameter skips a parameter that is not known.
func (c httpCall) readParameter(s *codec.Scanner, key []byte) (known bool) {
	switch string(key) {
	case "priority":
		s.Check(c.SetPriority(s.Integer()))
	case "timeout":
		s.Check(c.SetTimeout(s.Integer()))
	case "sequence_id":
		c.readSequenceID(s)
	case "sequence_start":
		c.Step.Start = s.Boolean()
	case "sequence_end":
		c.Step.End = s.Boolean()
	case "binary_data_output":
		c.Binary = s.Boolean()
	default:
		s.Skip()
		return false
	}
	return true
}

func (c httpCall) readSequenceID(s *codec.Scanner) {
	text := s.Skip()
	var err error
	switch {
	case len(text) == 0: // s has failed
	case text[0] == '"':
		c.Step.ID, err = core.TextSequenceID(codec.NewScanner(text).Text())
	default:
		if c.Step.ID.Number, err = strconv.ParseUint(string(text), 10, 64); err != nil {
			err = core.ErrSequenceID
		}
	}
	s.Check(err)
}

// readInput returns the input's size in the binary part of the body.
func (c httpCall) readInput(s *codec.Scanner, body *core.BodySource) (binary int) {
	if len(c.Inputs) >= tensor.MaxTensors {
		s.Fail("too many inputs")
		return 0
	}
	in := c.AddInput()
	var data []byte
	size, typeErr := int64(-1), error(nil)
	s.Each(func(key []byte) {
		switch string(key) {
		case "name":
			in.Name = c.NameOf(s.Text())
		case "datatype":
			in.DType, typeErr = oip.ParseType(string(s.Text()))
		case "shape":
			in.Shape = in.Shape[:0]
			s.Items(func() { in.Shape = appendDim(s, in.Shape, s.Integer()) })
		case "data":
			data = s.Skip()
		case "parameters":
			s.Each(func(key []byte) {
				if string(key) == "binary_data_size" {
					size = s.Integer()
				} else {
					c.readRegion(&in.Region, s, key)
				}
			})
		default:
			s.Skip()
		}
	})
	ways := 0
	if data != nil {
		ways++
		in.Src = core.JSONSource{Reader: codec.NewReader(data, in.DType, in.Shape)}
	}
	if size >= 0 {
		ways++
		in.Src, in.Size, binary = body, int(size), int(size)
	}
	if in.Region != nil {
		ways++
		in.Size = int(in.Region.Size)
	}
	switch {
	case typeErr != nil:
		s.Check(typeErr)
	case ways != 1:
		s.Check(core.BadRequest("input %q needs its bytes in one way: data, binary_data_size, or shared_memory_region", in.Name))
	case size > int64(c.Model.G.Cfg.MaxMessageBytes):
		s.Check(core.TooLarge(size, c.Model.G.Cfg.MaxMessageBytes))
	case size >= 0 && body == nil:
		s.Check(core.BadRequest("input %q has a binary_data_size, but no header %s says where the JSON ends", in.Name, headerLength))
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
	if len(c.Outputs) >= tensor.MaxTensors {
		s.Fail("too many outputs")
		return
	}
	o := c.AddOutput()
	s.Each(func(key []byte) {
		switch string(key) {
		case "name":
			o.Name = c.NameOf(s.Text())
		case "parameters":
			s.Each(func(key []byte) {
				switch string(key) {
				case "binary_data":
					o.Form = core.FormJSON
					if s.Boolean() {
						o.Form = core.FormBinary
					}
				case "classification":
					if s.Integer() > 0 {
						s.Check(core.ErrClassification)
					}
				default:
					c.readRegion(&o.Region, s, key)
				}
			})
		default:
			s.Skip()
		}
	})
}

// readRegion reads a parameter of a tensor's place in shared memory, and skips
// others.
func (c httpCall) readRegion(u **core.RegionUse, s *codec.Scanner, key []byte) {
	switch string(key) {
	case "shared_memory_region":
		c.Place(u).Name = string(s.Text())
	case "shared_memory_offset":
		c.Place(u).Offset = s.Integer()
	case "shared_memory_byte_size":
		c.Place(u).Size = s.Integer()
	default:
		s.Skip()
	}
}
