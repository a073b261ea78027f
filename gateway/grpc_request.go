// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"fmt"
	"unicode/utf8"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/ringbatch/ringbatch/gateway/oip"
	"github.com/ringbatch/ringbatch/tensor"
)

// readRegionParameter reads one of the parameters that say where in shared memory a tensor lies.
func readRegionParameter(p *oip.Parameter, u *regionUse) {
	switch string(p.Key) {
	case "shared_memory_region":
		u.name = string(p.Text)
	case "shared_memory_offset":
		u.offset = p.Number
	case "shared_memory_byte_size":
		u.size = p.Number
	}
}

// rpcCall is a call in a message of gRPC.
type rpcCall struct{ *call }

// readMessage is readJSON for gRPC. The message has been split, and stays
// until the sources have been read.
func (c rpcCall) readMessage(m *oip.Request) error {
	if len(m.ID) > maxIDBytes || !utf8.Valid(m.ID) {
		return badRequest("an id of %d bytes; it is to be text of at most %d", len(m.ID), maxIDBytes)
	}
	c.id = string(m.ID)
	if m.Copied > smallBuffer {
		if err := c.take(m.Copied); err != nil {
			return err
		}
	}
	for _, b := range m.Parameters {
		p, err := oip.ReadParameter(b)
		if err != nil {
			return err
		}
		switch key := string(p.Key); {
		case key == oip.RequestsParameter:
			err = c.readRelayed(p.Text)
		case key != "priority" && key != "timeout": // others may be anything
		case p.IsOther:
			err = badRequest("parameter %q is to be a whole number", key)
		case key == "priority":
			err = c.setPriority(p.Number)
		default:
			err = c.setTimeout(p.Number)
		}
		if err != nil {
			return err
		}
	}
	raw := m.Raw
	for _, b := range m.Inputs {
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
			if len(m.Raw) > 0 {
				return badRequest("input %q has contents, and the request raw_input_contents; it is to be one of them", in.name)
			}
			if err := c.readContents(in, contents); err != nil {
				return err
			}
		case len(raw) == 0:
			return badRequest("raw_input_contents has %d entries, too few for the inputs", len(m.Raw))
		default:
			in.src, in.size = &raw[0], raw[0].Size()
			raw = raw[1:]
		}
	}
	if len(raw) > 0 {
		return badRequest("raw_input_contents has %d entries, more than the inputs", len(m.Raw))
	}
	for _, b := range m.Outputs {
		if err := c.readOutputMessage(b); err != nil {
			return err
		}
	}
	return nil
}

func (c rpcCall) readInputMessage(b []byte) (in *input, contents []byte, err error) {
	in = c.addInput()
	has := false
	err = oip.EachField(b, func(field protowire.Number, kind protowire.Type, number uint64, bytes []byte) (err error) {
		switch field {
		case 1:
			in.name = c.nameOf(bytes)
		case 2:
			in.dtype, err = oip.ParseType(string(bytes))
		case 3:
			if kind == protowire.VarintType {
				return addDim(in, number)
			}
			for len(bytes) > 0 {
				v, n := protowire.ConsumeVarint(bytes)
				if n < 0 {
					return oip.ErrMessage
				}
				bytes = bytes[n:]
				if err := addDim(in, v); err != nil {
					return err
				}
			}
		case 4:
			p, err := oip.ReadParameter(bytes)
			if err != nil {
				return err
			}
			readRegionParameter(&p, &in.region)
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

func (c rpcCall) readOutputMessage(b []byte) error {
	o := c.addOutput()
	return oip.EachField(b, func(field protowire.Number, _ protowire.Type, _ uint64, bytes []byte) error {
		switch field {
		case 1:
			o.name = c.nameOf(bytes)
		case 2:
			p, err := oip.ReadParameter(bytes)
			if err != nil {
				return err
			}
			if string(p.Key) == "classification" && p.Number > 0 {
				return errClassification
			}
			readRegionParameter(&p, &o.region)
		}
		return nil
	})
}

func addDim(in *input, v uint64) error {
	if len(in.shape) > tensor.MaxRank || v > 1<<40 {
		return fmt.Errorf("input %q: %w", in.name, badRequest("no such shape"))
	}
	in.shape = append(in.shape, int(v))
	return nil
}
