// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"time"

	"github.com/ringbatch/ringbatch/gateway/oip"
	"github.com/ringbatch/ringbatch/internal/codec"
	"github.com/ringbatch/ringbatch/tensor"
)

// readJSON reads an inference request's JSON, which is the whole body or the
// head of a binary one. The tensors of a binary body follow in the order of
// the inputs: their source is body.
func (c *call) readJSON(text []byte, body *bodySource) (binary int, err error) {
	s := &scanner{text: text}
	s.each(func(key []byte) {
		switch string(key) {
		case "id":
			c.setID(s, s.string())
		case "parameters":
			c.readParameters(s)
		case "inputs":
			s.items(func() { binary += c.readInput(s, body) })
		case "outputs":
			s.items(func() { c.readOutput(s) })
		default:
			s.skip()
		}
	})
	s.end()
	return binary, s.err
}

func (c *call) setID(s *scanner, id []byte) {
	if len(id) > maxIDBytes {
		s.fail("an id that long")
		return
	}
	c.id = string(id)
}

func (c *call) readParameters(s *scanner) {
	s.each(func(key []byte) {
		switch string(key) {
		case "priority":
			s.check(c.setPriority(s.integer()))
		case "timeout":
			s.check(c.setTimeout(s.integer()))
		case "binary_data_output":
			c.binary = s.boolean()
		default:
			s.skip()
		}
	})
}

// setPriority takes the protocol's number: 0 asks for the default, 1 is the
// most urgent.
func (c *call) setPriority(p int64) error {
	if p < 0 {
		return badRequest("priority %d: it is to be 0, the model's default, or 1 (the most urgent) and up", p)
	}
	if p > 0 {
		c.level = int(min(p, 1<<30)) - 1
	}
	return nil
}

// setTimeout takes microseconds.
func (c *call) setTimeout(us int64) error {
	if us < 0 {
		return badRequest("timeout %d: it is to be microseconds, or 0 for none", us)
	}
	if us < int64(1<<62/time.Microsecond) {
		c.timeout = time.Duration(us) * time.Microsecond
	}
	return nil
}

// readInput gives the bytes that it has in the binary part of the body.
func (c *call) readInput(s *scanner, body *bodySource) (binary int) {
	if len(c.inputs) >= tensor.MaxTensors {
		s.fail("too many inputs")
		return 0
	}
	in := c.addInput()
	var data []byte
	size, typeErr := int64(-1), error(nil)
	s.each(func(key []byte) {
		switch string(key) {
		case "name":
			in.name = c.nameOf(s.string())
		case "datatype":
			in.dtype, typeErr = oip.ParseType(string(s.string()))
		case "shape":
			in.shape = in.shape[:0]
			s.items(func() { in.shape = appendDim(s, in.shape, s.integer()) })
		case "data":
			data = s.skip()
		case "parameters":
			s.each(func(key []byte) {
				if string(key) == "binary_data_size" {
					size = s.integer()
				} else {
					in.region.readParameter(s, key)
				}
			})
		default:
			s.skip()
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
	case s.err != nil:
	case typeErr != nil:
		s.err = typeErr
	case ways != 1:
		s.err = badRequest("input %q needs its bytes in one way: data, binary_data_size, or shared_memory_region", in.name)
	case size > int64(c.model.g.cfg.MaxMessageBytes):
		s.err = tooLarge(size, c.model.g.cfg.MaxMessageBytes)
	case size >= 0 && body == nil:
		s.err = badRequest("input %q has a binary_data_size, but no header %s says where the JSON ends", in.name, headerLength)
	}
	return binary
}

func appendDim(s *scanner, shape []int, d int64) []int {
	if len(shape) > tensor.MaxRank || d < 0 || d > 1<<40 {
		s.fail("no such shape")
		return shape
	}
	return append(shape, int(d))
}

// nameOf is a tensor's name without a copy, where the model has it.
func (c *call) nameOf(name []byte) string {
	for _, side := range [][]tensor.Spec{c.model.sig.Inputs, c.model.sig.Outputs} {
		for i := range side {
			if side[i].Name == string(name) {
				return side[i].Name
			}
		}
	}
	return string(name[:min(len(name), tensor.MaxNameBytes)])
}

func (c *call) readOutput(s *scanner) {
	if len(c.outputs) >= tensor.MaxTensors {
		s.fail("too many outputs")
		return
	}
	o := c.addOutput()
	s.each(func(key []byte) {
		switch string(key) {
		case "name":
			o.name = c.nameOf(s.string())
		case "parameters":
			s.each(func(key []byte) {
				switch string(key) {
				case "binary_data":
					o.form = formJSON
					if s.boolean() {
						o.form = formBinary
					}
				case "classification":
					if s.integer() > 0 && s.err == nil {
						s.err = errClassification
					}
				default:
					o.region.readParameter(s, key)
				}
			})
		default:
			s.skip()
		}
	})
}

var errClassification = badRequest("the classification extension is not supported; ask for the output itself")

// readParameter reads one of the parameters that say where in shared memory a
// tensor lies, and steps over others.
func (u *regionUse) readParameter(s *scanner, key []byte) {
	switch string(key) {
	case "shared_memory_region":
		u.name = string(s.string())
	case "shared_memory_offset":
		u.offset = s.integer()
	case "shared_memory_byte_size":
		u.size = s.integer()
	default:
		s.skip()
	}
}
