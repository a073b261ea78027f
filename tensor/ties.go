// SPDX-License-Identifier: Apache-2.0

package tensor

import (
	"fmt"

	"github.com/ringbatch/ringbatch/status"
)

// Ties says which variable dimensions of a model have one size, because they share a name.
// Dimensions are counted over all tensors of a side.
type Ties struct {
	Inputs  [MaxVariableDims]uint8 // the first input dimension of the same name; itself if there is none before it
	Outputs [MaxVariableDims]uint8 // the same among the outputs
	From    [MaxVariableDims]int8  // of an output dimension: the first input dimension of its name, or -1
	Named   bool                   // some output dimension has an input's name
}

// dim is a variable dimension.
type dim struct {
	name string
	of   *Spec
	most int
}

func variableDims(side []Spec) (list []dim) {
	for k := range side {
		t := &side[k]
		for v, d := range t.Variable {
			list = append(list, dim{t.DimName(v), t, t.Shape[d]})
		}
	}
	return list
}

// first is the index of the first dimension with that name, or other.
func first(list []dim, name string, other int) int {
	for i := range list {
		if name != "" && list[i].name == name {
			return i
		}
	}
	return other
}

// Ties of the signature, which is valid.
func (s *Signature) Ties() (t Ties) {
	inputs, outputs := variableDims(s.Inputs), variableDims(s.Outputs)
	for i, d := range inputs {
		t.Inputs[i] = uint8(first(inputs[:i], d.name, i))
	}
	for i, d := range outputs {
		t.Outputs[i] = uint8(first(outputs[:i], d.name, i))
		t.From[i] = int8(first(inputs, d.name, -1))
		t.Named = t.Named || t.From[i] >= 0
	}
	return t
}

// Follow gives outputs that have an input's dimension its size.
func (t *Ties) Follow(outputs, inputs []uint32) {
	for i := range outputs {
		if from := t.From[i]; t.Named && from >= 0 {
			outputs[i] = inputs[from]
		}
	}
}

// CheckSizes refuses sizes of the inputs' variable dimensions that differ though they share a name.
func (t *Ties) CheckSizes(inputs []Spec, dims []uint32) error {
	for i := range dims {
		if j := t.Inputs[i]; dims[i] != dims[j] {
			all := variableDims(inputs)
			return differ(all[j], "input", dims[j], all[i], "input", dims[i])
		}
	}
	return nil
}

// CheckOutputs is CheckSizes for a row's outputs; given are the sizes of its inputs.
func (t *Ties) CheckOutputs(s *Signature, given, dims []uint32) error {
	for i := range dims {
		if from := t.From[i]; from >= 0 && dims[i] != given[from] {
			return differ(variableDims(s.Inputs)[from], "input", given[from], variableDims(s.Outputs)[i], "output", dims[i])
		}
		if j := t.Outputs[i]; dims[i] != dims[j] {
			all := variableDims(s.Outputs)
			return differ(all[j], "output", dims[j], all[i], "output", dims[i])
		}
	}
	return nil
}

func differ(a dim, as string, size uint32, b dim, bs string, other uint32) error {
	return fmt.Errorf("%w: %s %q has %d %s, %s %q has %d", status.ErrShape, as, a.of.Name, size, a.name, bs, b.of.Name, other)
}

// validateNames refuses two maxima of one name.
func (s *Signature) validateNames() error {
	all := append(variableDims(s.Inputs), variableDims(s.Outputs)...)
	for i, d := range all {
		if j := first(all[:i], d.name, -1); j >= 0 && all[j].most != d.most {
			return fmt.Errorf("%w: %s has at most %d in %q and %d in %q: tensors that share a dimension's name share its maximum",
				status.ErrInvalid, d.name, all[j].most, all[j].of.Name, d.most, d.of.Name)
		}
	}
	return nil
}
