// SPDX-License-Identifier: Apache-2.0

package grpcapi

import (
	"fmt"
	"unicode/utf8"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/ringbatch/ringbatch/gateway/core"
	"github.com/ringbatch/ringbatch/gateway/oip"
	"github.com/ringbatch/ringbatch/tensor"
)

type rpcCall struct{ *core.Call }

// readRegionParameter reads a parameter of a tensor's place in shared memory.
func (c rpcCall) readRegionParameter(p *oip.Parameter, u **core.RegionUse) {
	switch string(p.Key) {
	case "shared_memory_region":
		c.Place(u).Name = string(p.Text)
	case "shared_memory_offset":
		c.Place(u).Offset = p.Number
	case "shared_memory_byte_size":
		c.Place(u).Size = p.Number
	}
}

// readMessage reads a request that is split. Its buffers are the inputs' sources.
func (c rpcCall) readMessage(m *oip.Request) error {
	if len(m.ID) > core.MaxIDBytes || !utf8.Valid(m.ID) {
		return core.BadRequest("an id of %d bytes; it is to be text of at most %d", len(m.ID), core.MaxIDBytes)
	}
	c.ID = string(m.ID)
	if m.Copied > core.SmallBuffer {
		if err := c.Take(m.Copied); err != nil {
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
			err = c.ReadRelayed(p.Text)
		case key == sequenceID:
			c.Step.ID, err = readSequenceID(&p)
		case key == "sequence_start" || key == "sequence_end":
			if p.Choice != oip.ChoiceBool {
				return core.BadRequest("parameter %q is to be true or false", key)
			}
			if key == "sequence_start" {
				c.Step.Start = p.Bits != 0
			} else {
				c.Step.End = p.Bits != 0
			}
		case key == finalResponse:
			c.Parts = p.Choice == oip.ChoiceBool && p.Bits != 0
		case key != "priority" && key != "timeout":
		case p.IsOther:
			err = core.BadRequest("parameter %q is to be a whole number", key)
		case key == "priority":
			err = c.SetPriority(p.Number)
		default:
			err = c.SetTimeout(p.Number)
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
		case in.Region != nil:
			if contents != nil {
				return core.BadRequest("input %q has contents and lies in shared memory too", in.Name)
			}
			in.Size = int(in.Region.Size)
		case contents != nil:
			if len(m.Raw) > 0 {
				return core.BadRequest("input %q has contents, and the request raw_input_contents; it is to be one of them", in.Name)
			}
			if err := c.readContents(in, contents); err != nil {
				return err
			}
		case len(raw) == 0:
			return core.BadRequest("raw_input_contents has %d entries, too few for the inputs", len(m.Raw))
		default:
			in.Src, in.Size = &raw[0], raw[0].Size()
			raw = raw[1:]
		}
	}
	if len(raw) > 0 {
		return core.BadRequest("raw_input_contents has %d entries, more than the inputs", len(m.Raw))
	}
	for _, b := range m.Outputs {
		if err := c.readOutputMessage(b); err != nil {
			return err
		}
	}
	return nil
}

const (
	sequenceID    = "sequence_id"
	finalResponse = "triton_enable_empty_final_response" // asks for the answer in parts, and an empty one after them
)

func readSequenceID(p *oip.Parameter) (core.SequenceID, error) {
	switch p.Choice {
	case oip.ChoiceInt, oip.ChoiceUint:
		return core.SequenceID{Number: p.Bits}, nil
	case oip.ChoiceString:
		return core.TextSequenceID(p.Text)
	}
	return core.SequenceID{}, core.ErrSequenceID
}

func (c rpcCall) readInputMessage(b []byte) (in *core.Input, contents []byte, err error) {
	in = c.AddInput()
	has := false
	err = oip.EachField(b, func(field protowire.Number, kind protowire.Type, number uint64, bytes []byte) (err error) {
		switch field {
		case 1:
			in.Name = c.NameOf(bytes)
		case 2:
			in.DType, err = oip.ParseType(string(bytes))
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
			c.readRegionParameter(&p, &in.Region)
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
	o := c.AddOutput()
	return oip.EachField(b, func(field protowire.Number, _ protowire.Type, _ uint64, bytes []byte) error {
		switch field {
		case 1:
			o.Name = c.NameOf(bytes)
		case 2:
			p, err := oip.ReadParameter(bytes)
			if err != nil {
				return err
			}
			if string(p.Key) == "classification" && p.Number > 0 {
				return core.ErrClassification
			}
			c.readRegionParameter(&p, &o.Region)
		}
		return nil
	})
}

func addDim(in *core.Input, v uint64) error {
	if len(in.Shape) > tensor.MaxRank || v > 1<<40 {
		return fmt.Errorf("input %q: %w", in.Name, core.BadRequest("no such shape"))
	}
	in.Shape = append(in.Shape, int(v))
	return nil
}
