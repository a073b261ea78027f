// SPDX-License-Identifier: Apache-2.0

package httpapi

import (
	"net/http"
	"strconv"

	"github.com/ringbatch/ringbatch/gateway/core"
)

// isInference reports whether a path that ends with this runs a model.
func isInference(last string) bool {
	return last == "infer" || last == "generate" || last == "generate_stream"
}

// infer answers POST /v2/models/NAME[/versions/VERSION]/infer, generate and generate_stream.
func (d httpDoor) infer(w http.ResponseWriter, r *http.Request, who *core.Caller, path []string) error {
	if len(path) < 4 || path[0] != "v2" || path[1] != "models" {
		return d.other(w, r)
	}
	name, version, rest := modelPath(path[2:])
	if len(rest) != 1 {
		return d.other(w, r)
	}
	if err := d.g.BeginRequest(who); err != nil {
		return err
	}
	defer d.g.EndRequest(who)
	k, as, err := d.g.Models.Get(r.Context(), name, version)
	if err != nil {
		return err
	}
	b := bodies.Get().(*body)
	defer b.done()
	c := core.NewCall(k, as, who)
	defer c.Done()
	err = d.inferCall(w, r, httpCall{c}, b, rest[0])
	c.Count(err)
	if b.begun {
		return nil // the caller has the error
	}
	return err
}

func (d httpDoor) inferCall(w http.ResponseWriter, r *http.Request, c httpCall, b *body, how string) error {
	if most := d.g.Cfg.MaxMessageBytes; r.ContentLength > int64(most) {
		return core.TooLarge(r.ContentLength, most)
	}
	paced := newPacedBody(w, r, &d.g.Cfg.Pace)
	if err := b.open(c, paced, r.ContentLength, r.Header.Get("Content-Encoding")); err != nil {
		return err
	}
	defer b.close()
	if how != "infer" {
		if err := b.readText(c, b.length); err != nil {
			return err
		}
		if err := c.readGenerate(b.text); err != nil {
			return err
		}
	} else if err := b.read(c, r.Header.Get(headerLength)); err != nil {
		return err
	}
	if err := c.Check(); err != nil {
		return err
	}
	whole, err := b.readAhead(c)
	if err != nil {
		return err
	}
	if whole {
		paced.endPace()
	} else {
		c.OnWait, c.OnFilled = paced.restart, paced.endPace
	}
	if how == "generate_stream" {
		return c.stream(w, r, paced.control, b)
	}
	if err := c.Run(r.Context()); err != nil {
		return err
	}
	if how == "generate" {
		return c.writeGenerated(w, paced.control, b)
	}
	return c.writeHTTP(w, paced.control, b)
}

// writeHTTP sends the JSON of the answer, and then the tensors from the slots.
func (c httpCall) writeHTTP(w http.ResponseWriter, control *http.ResponseController, b *body) error {
	if n := c.mostJSONBytes(); n > core.SmallBuffer {
		if err := c.Take(n); err != nil {
			return err
		}
	}
	text, binary := c.appendAnswer(b.text[:0])
	b.text = text
	h := w.Header()
	h["Content-Type"] = typeJSON
	if binary > 0 {
		h["Content-Type"] = typeBinary
		h[headerLength] = []string{strconv.Itoa(len(text))}
	}
	h["Content-Length"] = []string{strconv.Itoa(len(text) + binary)}
	_ = control.SetWriteDeadline(c.Ended.Add(c.Model.G.AnswerTime(len(text) + binary)))
	if binary <= smallAnswer { // one write
		c.eachBinary(func(p []byte) { text = append(text, p...) })
		b.text = text
	}
	_, err := w.Write(text)
	if binary > smallAnswer {
		c.eachBinary(func(p []byte) {
			if err == nil {
				_, err = w.Write(p)
			}
		})
	}
	return nil // after an error of writing the caller is gone
}

// Copying so few bytes costs less than another system call.
const smallAnswer = 4 << 10

// eachBinary calls each for the pieces of the tensors that follow the JSON.
func (c httpCall) eachBinary(each func(p []byte)) {
	for i := range c.Outputs {
		if o := &c.Outputs[i]; c.isBinary(o) {
			for _, p := range o.Parts {
				each(p)
			}
		}
	}
}
