// SPDX-License-Identifier: Apache-2.0

package core

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/gateway/oip"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

// Call is one inference, in the steps that it goes through:
//
//  1. a door reads the request: names, types, shapes, parameters, and the source of
//     each input's bytes
//  2. Check compares them with the model's signature, and chooses the runner
//  3. Run claims slots, fills them from the sources, commits and waits
//  4. the door sends the outputs from the slots
//  5. Done gives the slots back
type Call struct {
	Model  *Model
	As     *route // the alias that the caller named; nil: none
	Caller *Caller
	// OnPart, if not nil, gets the parts of an answer of one row, if an output grows. Its
	// error ends the call. Streamed is the last part; nil: there was none.
	OnPart   func(o *Output) error
	Parts    bool // gRPC: the caller can take parts
	Streamed *Output
	// OnFilled is called when the sources are read, OnWait after a wait for slots.
	// Either may be nil.
	OnFilled, OnWait func()
	ID               string

	Inputs  []Input
	Outputs []Output     // none: all; Check fills them in
	regions []*RegionUse // of tensors in the caller's shared memory

	level   int           // priority level; -1: the model's default
	timeout time.Duration // 0: none
	Binary  bool          // HTTP: outputs are binary by default

	runner  runner // Check chooses it
	plain   plain
	Step    Step    // of a sequence; models without state ignore it
	relayed relayed // a relay's batch

	rows int
	dims []int // the inputs' variable sizes, in signature order

	Committed  bool   // a worker may have run some of it
	Parameters []byte // of the answer, encoded
	Memory            // that the request takes in the gateway
	weights    uint32
	on         *attachment // nil: none
	share      heldShare
	times
}

// runner is a way to run a call: plain (run.go), as a step of a sequence (sequences.go), or
// as a relay's batch (relayed.go).
type runner interface {
	// prepare checks what only this way has.
	prepare(c *Call) error
	// inputBytes is the size of an input that has so many bytes by its shape.
	inputBytes(c *Call, in *Input, shaped int) int
	// run runs the call on its present model. Its outputs can be read until release.
	run(ctx context.Context, c *Call) error
	release()
}

// times are for the statistics.
type times struct {
	began, filled, Ended time.Time
	queue, compute       time.Duration
}

// WeightsVersion is the version of the live weights that made the outputs; 0: the model has none.
func (c *Call) WeightsVersion() uint64 {
	return uint64(c.weights)
}

// noteWeights keeps the version that answered a request: the oldest, if there are several.
func (c *Call) noteWeights(r client.Request) {
	if v, err := r.Version(); err == nil && (c.weights == 0 || v < c.weights) {
		c.weights = v
	}
}

// Input is an input tensor of the caller.
type Input struct {
	Name  string
	DType tensor.DType
	Shape []int // rows first
	Src   source
	Size  int // bytes of the source; -1: its Finish checks them
	left  int // of text: bytes of the source that are left
	index int // in the signature

	Region *RegionUse // nil: not in shared memory
}

// source reads the input into slots.
func (in *Input) source(spec *tensor.Spec) source {
	if spec.DType != tensor.Str {
		return in.Src
	}
	if s, ok := in.Src.(JSONSource); ok {
		s.TextBytes = spec.TextBytes()
		return s
	}
	return oip.TextSource{Src: in.Src, Spec: spec, Left: &in.left}
}

// Output is an output tensor, in the form that the caller wants.
type Output struct {
	Name   string
	index  int        // in the signature
	Region *RegionUse // nil: not in shared memory
	Form   outputForm

	DType tensor.DType
	Shape []int    // rows first
	Parts [][]byte // the bytes
	Size  int
}

type outputForm uint8

const (
	FormDefault outputForm = iota
	FormBinary
	FormJSON
)

// Check compares the call with the signature, and checks every number in it.
func (c *Call) Check() error {
	sig := &c.Model.Sig
	if c.runner == nil {
		if c.runner = &c.plain; len(sig.State) > 0 && c.Step != (Step{}) {
			c.runner = &c.Step
		}
	}
	if err := c.matchInputs(sig); err != nil {
		return err
	}
	c.dims = c.dims[:0]
	c.rows = 0
	for k := range sig.Inputs {
		in := &c.Inputs[slices.IndexFunc(c.Inputs, func(in Input) bool { return in.index == k })]
		if err := c.checkInput(&sig.Inputs[k], in); err != nil {
			return err
		}
		if k > 0 && in.Shape[0] != c.rows {
			return fmt.Errorf("%w: input %q has %d rows, %q has %d", status.ErrRows, in.Name, in.Shape[0], sig.Inputs[0].Name, c.rows)
		}
		c.rows = in.Shape[0]
	}
	if err := c.runner.prepare(c); err != nil {
		return err
	}
	if levels := c.levels(); c.level >= levels {
		return fmt.Errorf("%w: priority %d, the model has 1..%d", status.ErrNoLevel, c.level+1, levels)
	}
	if err := c.matchOutputs(sig); err != nil {
		return err
	}
	if len(c.regions) > 0 {
		return c.useRegions()
	}
	return nil
}

func (c *Call) levels() int { return c.Model.info.Load().settings.LevelCount() }

func (c *Call) matchInputs(sig *tensor.Signature) error {
	for i := range c.Inputs {
		in := &c.Inputs[i]
		if in.index = indexOf(sig.Inputs, in.Name); in.index < 0 {
			return BadRequest("model %q has no input %q; it is %s", c.Model.Name, in.Name, sig)
		}
		if slices.ContainsFunc(c.Inputs[:i], func(other Input) bool { return other.index == in.index }) {
			return BadRequest("input %q is given twice", in.Name)
		}
	}
	for k := range sig.Inputs {
		if !slices.ContainsFunc(c.Inputs, func(in Input) bool { return in.index == k }) {
			return BadRequest("input %q of model %q is missing; it is %s", sig.Inputs[k].Name, c.Model.Name, sig)
		}
	}
	return nil
}

func indexOf(specs []tensor.Spec, name string) int {
	return slices.IndexFunc(specs, func(s tensor.Spec) bool { return s.Name == name })
}

func (c *Call) checkInput(spec *tensor.Spec, in *Input) error {
	if in.DType == 0 {
		return BadRequest("input %q has no datatype; it is %s", in.Name, oip.TypeName(spec.DType))
	}
	if in.DType != spec.DType {
		return fmt.Errorf("%w: input %q is %s, got %s", status.ErrDType, in.Name, oip.TypeName(spec.DType), oip.TypeName(in.DType))
	}
	if most := spec.TextBytes(); most > 0 {
		in.left = in.Size
		in.Shape = append(in.Shape, most)
	}
	wrong := func() error {
		return fmt.Errorf("%w: input %q has shape %v, got %v", status.ErrShape, in.Name, oip.WireShape(spec), oip.WireRow(spec, in.Shape))
	}
	if len(in.Shape) != len(spec.Shape)+1 {
		return wrong()
	}
	if rows := in.Shape[0]; rows < 1 || rows > maxRows {
		return fmt.Errorf("%w: input %q has %d rows, must be 1..%d", status.ErrRows, in.Name, rows, maxRows)
	}
	bytes, v := spec.DType.Size(), 0
	for i, most := range spec.Shape {
		got := in.Shape[i+1]
		if v < len(spec.Variable) && spec.Variable[v] == i {
			v++
			if got < 0 || got > most {
				return fmt.Errorf("%w: input %q: dimension %d is at most %d, got %v", status.ErrShape, in.Name, i+1, most, in.Shape)
			}
			c.dims = append(c.dims, got)
		} else if got != most {
			return wrong()
		}
		bytes *= got
	}
	need := c.runner.inputBytes(c, in, bytes*in.Shape[0])
	if spec.DType == tensor.Str {
		need = in.Size // texts are shorter than their memory
	}
	if in.Size >= 0 && in.Size != need {
		return fmt.Errorf("%w: input %q of shape %v takes %d bytes, got %d", status.ErrSize, in.Name, in.Shape, need, in.Size)
	} else if need > c.Model.G.Cfg.MaxMessageBytes {
		return TooLarge(int64(need), c.Model.G.Cfg.MaxMessageBytes)
	}
	return nil
}

// matchOutputs finds the outputs to answer: all, if the caller names none.
func (c *Call) matchOutputs(sig *tensor.Signature) error {
	if len(c.Outputs) == 0 {
		for k := range sig.Outputs {
			o := c.AddOutput()
			o.Name, o.index = sig.Outputs[k].Name, k
		}
		return nil
	}
	for i := range c.Outputs {
		o := &c.Outputs[i]
		if o.index = indexOf(sig.Outputs, o.Name); o.index < 0 {
			return BadRequest("model %q has no output %q; it is %s", c.Model.Name, o.Name, sig)
		}
		if slices.ContainsFunc(c.Outputs[:i], func(other Output) bool { return other.index == o.index }) {
			return BadRequest("output %q is asked for twice", o.Name)
		}
	}
	return nil
}

// AddInput reuses the memory of earlier calls.
func (c *Call) AddInput() *Input {
	if len(c.Inputs) < cap(c.Inputs) {
		c.Inputs = c.Inputs[:len(c.Inputs)+1]
		in := &c.Inputs[len(c.Inputs)-1]
		*in = Input{Shape: in.Shape[:0], Size: -1}
		return in
	}
	c.Inputs = append(c.Inputs, Input{Size: -1})
	return &c.Inputs[len(c.Inputs)-1]
}

func (c *Call) AddOutput() *Output {
	if len(c.Outputs) < cap(c.Outputs) {
		c.Outputs = c.Outputs[:len(c.Outputs)+1]
		o := &c.Outputs[len(c.Outputs)-1]
		*o = Output{Shape: o.Shape[:0], Parts: o.Parts[:0]}
		return o
	}
	c.Outputs = append(c.Outputs, Output{})
	return &c.Outputs[len(c.Outputs)-1]
}

// Making a call would be most of a small request's cost.
var calls = sync.Pool{New: func() any { return new(Call) }}

// NewCall returns a call of a model, by an alias or by its own name (nil).
func NewCall(k *Model, as *route, who *Caller) *Call {
	c := calls.Get().(*Call)
	c.Model, c.As, c.Caller, c.Memory = k, as, who, k.G.NewMemory(who)
	c.level, c.began = -1, time.Now()
	return c
}

// Done gives everything back, also after an error.
func (c *Call) Done() {
	if c.runner != nil {
		c.runner.release()
	}
	c.share.giveBack()
	c.leaveClient()
	c.GiveBack()
	if len(c.regions) > 0 {
		c.leaveRegions()
	}
	for i := range c.Inputs {
		c.Inputs[i].Src = nil
	}
	for i := range c.Outputs {
		clear(c.Outputs[i].Parts)
	}
	*c = Call{Inputs: c.Inputs[:0], Outputs: c.Outputs[:0], dims: c.dims[:0], Parameters: c.Parameters[:0], relayed: c.relayed.emptied()}
	calls.Put(c)
}

// SetPriority takes the protocol's number: 0 is the default, 1 the most urgent.
func (c *Call) SetPriority(p int64) error {
	if p < 0 {
		return BadRequest("priority %d: it is to be 0, the model's default, or 1 (the most urgent) and up", p)
	}
	if p > 0 {
		c.level = int(min(p, 1<<30)) - 1
	}
	return nil
}

// SetTimeout takes microseconds.
func (c *Call) SetTimeout(us int64) error {
	if us < 0 {
		return BadRequest("timeout %d: it is to be microseconds, or 0 for none", us)
	}
	if us < int64(1<<62/time.Microsecond) {
		c.timeout = time.Duration(us) * time.Microsecond
	}
	return nil
}

// NameOf returns a tensor's name, without a copy if the model has it.
func (c *Call) NameOf(name []byte) string {
	for _, side := range [][]tensor.Spec{c.Model.Sig.Inputs, c.Model.Sig.Outputs} {
		for i := range side {
			if side[i].Name == string(name) {
				return side[i].Name
			}
		}
	}
	return string(name[:min(len(name), tensor.MaxNameBytes)])
}

// ErrClassification refuses an extension of Triton's.
var ErrClassification = BadRequest("the classification extension is not supported; ask for the output itself")
