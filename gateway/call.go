// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"fmt"
	"sync"
	"time"

	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/gateway/oip"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

// call is one inference, in the steps that it goes through:
//
//  1. http_infer.go or grpc_codec.go reads what is asked for: names, types,
//     shapes, parameters, and where each input's bytes come from
//  2. check compares that with the model's signature
//  3. run claims slots, fills them from the sources, commits and waits
//  4. the outputs are views of slot memory, for http_infer.go or grpc_codec.go to
//     send, or are written into the caller's shared memory
//  5. release gives the slots back
type call struct {
	model  *model
	as     *route // the alias by which it was asked for; nil: none
	caller *caller
	// onFilled is called when the sources have been read, onWait after a wait for
	// slots; either may be nil.
	onFilled, onWait func()
	id               string

	inputs  []input
	outputs []output // what is asked for; after check: what will be answered

	level   int           // priority level, -1 the model's default
	timeout time.Duration // 0 none
	binary  bool          // HTTP: outputs are binary unless they say otherwise

	rows int
	dims []int // the inputs' variable sizes, in signature order

	request client.Request // whose slots the outputs lie in
	claimed bool
	relayed relayed // of a relay's batch; empty otherwise
	taken   int     // bytes that are counted as the caller's

	share      *share // of the window; nil: none is taken
	shareSlots int64

	began, filled, ended time.Time // for the statistics
	queue, compute       time.Duration
}

// input is one input tensor as the caller gives it.
type input struct {
	name  string
	dtype tensor.DType
	shape []int // rows first
	src   source
	size  int // bytes the source has; -1: it knows itself when it is done
	index int // in the signature

	region regionUse // if it lies in shared memory
}

// output is one output tensor as the caller wants it.
type output struct {
	name   string
	index  int // in the signature
	region regionUse
	form   outputForm

	dtype tensor.DType
	shape []int    // rows first
	parts [][]byte // its bytes
	size  int
}

// outputForm is how an HTTP caller wants an output.
type outputForm uint8

const (
	formDefault outputForm = iota
	formBinary
	formJSON
)

// check compares the call with the signature; after it the numbers in the call
// can be trusted.
func (c *call) check() error {
	sig := &c.model.sig
	if err := c.matchInputs(sig); err != nil {
		return err
	}
	c.dims = c.dims[:0]
	c.rows = 0
	for k := range sig.Inputs {
		var in *input
		for i := range c.inputs {
			if c.inputs[i].index == k {
				in = &c.inputs[i]
			}
		}
		if err := c.checkInput(&sig.Inputs[k], in); err != nil {
			return err
		}
		if k > 0 && in.shape[0] != c.rows {
			return fmt.Errorf("%w: input %q has %d rows, %q has %d", status.ErrRows, in.name, in.shape[0], sig.Inputs[0].Name, c.rows)
		}
		c.rows = in.shape[0]
	}
	if len(c.relayed.requests) > 0 { // the relay's host may have more levels
		c.level = min(c.level, c.model.info.Load().settings.LevelCount()-1)
	}
	if c.level >= 0 {
		if n := c.model.info.Load().settings.LevelCount(); c.level >= n {
			return fmt.Errorf("%w: priority %d, the model has 1..%d", status.ErrNoLevel, c.level+1, n)
		}
	}
	if err := c.matchOutputs(sig); err != nil {
		return err
	}
	if err := c.checkRelayed(); err != nil {
		return err
	}
	return c.checkRegions()
}

// matchInputs finds each input's place in the signature.
func (c *call) matchInputs(sig *tensor.Signature) error {
	for i := range c.inputs {
		in := &c.inputs[i]
		in.index = -1
		for k := range sig.Inputs {
			if sig.Inputs[k].Name == in.name {
				in.index = k
			}
		}
		if in.index < 0 {
			return badRequest("model %q has no input %q; it is %s", c.model.name, in.name, sig)
		}
		for j := range i {
			if c.inputs[j].index == in.index {
				return badRequest("input %q is given twice", in.name)
			}
		}
	}
	if len(c.inputs) != len(sig.Inputs) {
		return badRequest("model %q takes %d inputs, %d were given; it is %s", c.model.name, len(sig.Inputs), len(c.inputs), sig)
	}
	return nil
}

func (c *call) checkInput(spec *tensor.Spec, in *input) error {
	if in.dtype == 0 {
		return badRequest("input %q has no datatype; it is %s", in.name, oip.TypeName(spec.DType))
	}
	if in.dtype != spec.DType {
		return fmt.Errorf("%w: input %q is %s, got %s", status.ErrDType, in.name, oip.TypeName(spec.DType), oip.TypeName(in.dtype))
	}
	wrong := func() error {
		return fmt.Errorf("%w: input %q has shape %v, got %v", status.ErrShape, in.name, oip.WireShape(spec), in.shape)
	}
	if len(in.shape) != len(spec.Shape)+1 {
		return wrong()
	}
	if rows := in.shape[0]; rows < 1 || rows > maxRows {
		return fmt.Errorf("%w: input %q has %d rows, must be 1..%d", status.ErrRows, in.name, rows, maxRows)
	}
	bytes, v := spec.DType.Size(), 0
	for i, most := range spec.Shape {
		got := in.shape[i+1]
		if v < len(spec.Variable) && spec.Variable[v] == i {
			v++
			if got < 0 || got > most {
				return fmt.Errorf("%w: input %q: dimension %d is at most %d, got %v", status.ErrShape, in.name, i+1, most, in.shape)
			}
			c.dims = append(c.dims, got)
		} else if got != most {
			return wrong()
		}
		bytes *= got
	}
	need := bytes * in.shape[0]
	if len(c.relayed.requests) > 0 && len(spec.Variable) > 0 {
		need = c.relayed.bytesOf(&c.model.sig, in.index)
	}
	if in.size >= 0 && in.size != need {
		return fmt.Errorf("%w: input %q of shape %v takes %d bytes, got %d", status.ErrSize, in.name, in.shape, need, in.size)
	} else if need > c.model.g.cfg.MaxMessageBytes {
		return tooLarge(int64(need), c.model.g.cfg.MaxMessageBytes)
	}
	return nil
}

// matchOutputs finds what will be answered; all of them if none was named.
func (c *call) matchOutputs(sig *tensor.Signature) error {
	if len(c.outputs) == 0 {
		for k := range sig.Outputs {
			o := c.addOutput()
			o.name, o.index = sig.Outputs[k].Name, k
		}
		return nil
	}
	for i := range c.outputs {
		o := &c.outputs[i]
		o.index = -1
		for k := range sig.Outputs {
			if sig.Outputs[k].Name == o.name {
				o.index = k
			}
		}
		if o.index < 0 {
			return badRequest("model %q has no output %q; it is %s", c.model.name, o.name, sig)
		}
		for j := range i {
			if c.outputs[j].index == o.index {
				return badRequest("output %q is asked for twice", o.name)
			}
		}
	}
	return nil
}

// addInput and addOutput reuse the memory of earlier calls.
func (c *call) addInput() *input {
	if len(c.inputs) < cap(c.inputs) {
		c.inputs = c.inputs[:len(c.inputs)+1]
		in := &c.inputs[len(c.inputs)-1]
		*in = input{shape: in.shape[:0], size: -1}
		return in
	}
	c.inputs = append(c.inputs, input{size: -1})
	return &c.inputs[len(c.inputs)-1]
}

func (c *call) addOutput() *output {
	if len(c.outputs) < cap(c.outputs) {
		c.outputs = c.outputs[:len(c.outputs)+1]
		o := &c.outputs[len(c.outputs)-1]
		*o = output{shape: o.shape[:0], parts: o.parts[:0]}
		return o
	}
	c.outputs = append(c.outputs, output{})
	return &c.outputs[len(c.outputs)-1]
}

// Calls are used again: most of a small request's cost would be making them.
var calls = sync.Pool{New: func() any { return new(call) }}

func newCall() *call {
	c := calls.Get().(*call)
	c.level, c.began = -1, time.Now()
	return c
}

// done ends a call, however it went.
func (c *call) done() {
	c.release()
	for i := range c.inputs {
		c.inputs[i].src = nil
	}
	for i := range c.outputs {
		clear(c.outputs[i].parts)
	}
	c.model, c.caller, c.onFilled, c.onWait, c.id, c.request = nil, nil, nil, nil, "", client.Request{}
	c.inputs, c.outputs, c.dims = c.inputs[:0], c.outputs[:0], c.dims[:0]
	c.timeout, c.binary, c.rows = 0, false, 0
	c.relayed.reset()
	c.filled, c.ended, c.queue, c.compute = time.Time{}, time.Time{}, 0, 0
	calls.Put(c)
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

// errClassification refuses an extension that the gateway does not have.
var errClassification = badRequest("the classification extension is not supported; ask for the output itself")

// writeRegions puts those outputs into shared memory that are wanted there.
func (c *call) writeRegions() error {
	for i := range c.outputs {
		if o := &c.outputs[i]; o.region.region != nil {
			if err := o.write(); err != nil {
				return err
			}
		}
	}
	return nil
}
