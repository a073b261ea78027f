// SPDX-License-Identifier: Apache-2.0

package httpapi

import (
	"fmt"
	"net/http"
	"time"

	"github.com/ringbatch/ringbatch/gateway/core"
	"github.com/ringbatch/ringbatch/gateway/oip"
	"github.com/ringbatch/ringbatch/internal/codec"
	"github.com/ringbatch/ringbatch/tensor"
)

// Triton's generate extension: the fields of a JSON object are the inputs of one row, by
// name, and those of the answer its outputs. generate_stream sends an event for each part.

// readGenerate reads {"x": [1, 2], "parameters": {…}}. Other fields are parameters, too.
func (c httpCall) readGenerate(text []byte) error {
	s := codec.NewScanner(text)
	given := map[string]string{}
	parameter := func(key []byte) {
		value := s.Skip()
		own := codec.NewScanner(value)
		known := c.readParameter(own, key)
		if err := own.Err(); err != nil {
			s.Check(fmt.Errorf("parameter %q: %w", key, err))
		} else if was, again := given[string(key)]; again && was != string(value) {
			s.Check(core.BadRequest("parameter %q is given twice, as %.32s and %.32s", key, was, value))
		} else if known {
			given[string(key)] = string(value)
		}
	}
	s.Each(func(key []byte) {
		name := c.NameOf(key)
		k := 0
		for k < len(c.Model.Sig.Inputs) && c.Model.Sig.Inputs[k].Name != name {
			k++
		}
		switch {
		case k < len(c.Model.Sig.Inputs):
			c.readField(s, &c.Model.Sig.Inputs[k])
		case name == "id":
			c.setID(s, s.Text())
		case name == "parameters":
			s.Each(parameter)
		default:
			parameter(key)
		}
	})
	s.End()
	c.Binary = false
	return s.Err()
}

// readField reads an input of one row: a number, a text, or lists nested like the row's shape.
func (c httpCall) readField(s *codec.Scanner, spec *tensor.Spec) {
	if len(c.Inputs) >= tensor.MaxTensors {
		s.Fail("too many inputs")
		return
	}
	value := s.Skip()
	if s.Check(c.Take(len(value))); s.Err() != nil {
		return
	}
	in := c.AddInput()
	in.Name, in.DType, in.Shape = spec.Name, spec.DType, append(append(in.Shape[:0], 1), oip.WireRow(spec, spec.Shape)...)
	for at, first := 1, value; len(spec.Variable) > 0 && at < len(in.Shape); at++ {
		in.Shape[at] = 0
		list := codec.NewScanner(first)
		list.Items(func() {
			if item := list.Skip(); in.Shape[at] == 0 {
				first = item
			}
			in.Shape[at]++
		})
		s.Check(list.Err())
	}
	row := append(append(append(make([]byte, 0, len(value)+2), '['), value...), ']')
	in.Src = core.JSONSource{Reader: codec.NewReader(row, in.DType, in.Shape)}
}

// appendFields writes the outputs of one row as fields: a number, a text, or a flat list.
func (c httpCall) appendFields(b []byte, outputs []core.Output) []byte {
	b = append(b, '{')
	if c.ID != "" {
		b = append(codec.AppendString(append(b, `"id":`...), c.ID), ',')
	}
	b = codec.AppendString(append(b, `"model_name":`...), c.ModelName())
	b = codec.AppendString(append(b, `,"model_version":`...), c.ModelVersion())
	for i := range outputs {
		o := &outputs[i]
		b = append(codec.AppendString(append(b, ','), o.Name), ':')
		if len(o.Shape) > 1 {
			b = appendData(b, o)
		} else if o.DType == tensor.Str {
			oip.Texts(o.Parts[0], func(text []byte) { b = codec.AppendString(b, string(text)) })
		} else {
			b = codec.AppendJSON(b, o.DType, o.Parts[0], false)
		}
	}
	return append(b, '}')
}

func (c httpCall) writeGenerated(w http.ResponseWriter, control *http.ResponseController, b *body) error {
	if n := c.mostJSONBytes(); n > core.SmallBuffer {
		if err := c.Take(n); err != nil {
			return err
		}
	}
	b.text = c.appendFields(b.text[:0], c.Outputs)
	_ = control.SetWriteDeadline(time.Now().Add(c.Model.G.AnswerTime(len(b.text))))
	writeJSON(w, b.text)
	return nil
}

// stream sends events. The inputs have been read from b.text by the first one.
func (c httpCall) stream(w http.ResponseWriter, r *http.Request, control *http.ResponseController, b *body) error {
	event := func(text []byte) error {
		if !b.begun {
			b.begun = true
			w.Header()["Content-Type"] = []string{"text/event-stream; charset=utf-8"}
			w.Header()["Cache-Control"] = []string{"no-cache"}
		}
		_ = control.SetWriteDeadline(time.Now().Add(c.Model.G.AnswerTime(len(text))))
		if _, err := w.Write(text); err != nil {
			return core.ErrCallerGone
		}
		if control.Flush() != nil {
			return core.ErrCallerGone
		}
		return nil
	}
	fields := func(outputs []core.Output) []byte {
		return append(c.appendFields(append(b.text[:0], "data: "...), outputs), "\n\n"...)
	}
	taken := 0
	c.OnPart = func(o *core.Output) error {
		n := o.Size / o.DType.Size() * codec.MaxJSONBytes(o.DType)
		if n > core.SmallBuffer && n > taken {
			if err := c.Take(n - taken); err != nil {
				return err
			}
			taken = n
		}
		b.text = fields([]core.Output{*o})
		return event(b.text)
	}
	err := c.Run(r.Context())
	if err != nil && !b.begun {
		return err
	}
	if rest := c.Rest(); err == nil && len(rest) > 0 {
		if n := c.mostJSONBytes(); n > core.SmallBuffer {
			err = c.Take(n)
		}
		if err == nil {
			b.text = fields(rest)
			_ = event(b.text)
		}
	}
	if err != nil { // the status was sent
		_ = event(append(append(codec.AppendString([]byte(`data: {"error":`), core.TextOf(err)), '}'), "\n\n"...))
	}
	return err
}
