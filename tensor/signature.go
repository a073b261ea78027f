// SPDX-License-Identifier: Apache-2.0

package tensor

import (
	"cmp"
	"fmt"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/ringbatch/ringbatch/status"
)

// Spec describes one row of a tensor, without the batch dimension.
type Spec struct {
	Name  string `msgpack:"name"`
	DType DType  `msgpack:"dtype"`
	Shape []int  `msgpack:"shape"` // the maximum size of each dimension
	// Variable lists, ascending, the dimensions whose size (0..Shape[i]) each request
	// chooses; the others are fixed.
	Variable []int `msgpack:"variable,omitempty"`
	// Names has the name of each variable dimension, "" if it has none; nil if none has one.
	// Dimensions of a model that share a name have one size in a request.
	Names []string `msgpack:"names,omitempty"`
	// Memory is "" for host memory or "device:N" for the memory of a GPU, as the worker
	// that allocates the ring's device memory counts GPUs.
	Memory string `msgpack:"memory,omitempty"`
}

// Signature describes the inputs and outputs of a model. State is the tensors that a
// sequence keeps from one step to the next.
type Signature struct {
	Inputs  []Spec `msgpack:"inputs"`
	Outputs []Spec `msgpack:"outputs"`
	State   []Spec `msgpack:"state,omitempty"`
}

// RowElems is the number of elements of a row of the maximum shape.
func (t Spec) RowElems() int { return elems(t.Shape) }

// RowBytes is the size of a row of the maximum shape.
func (t Spec) RowBytes() int { return t.RowElems() * t.DType.Size() }

func elems(shape []int) int {
	n := 1
	for _, d := range shape {
		n *= d
	}
	return n
}

// String is the compact form that ParseSpec reads: x:f32[3,<=224,<=224].
func (t Spec) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s:%s[", t.Name, t.DType)
	v := 0
	for i, d := range t.Shape {
		if i > 0 {
			b.WriteByte(',')
		}
		if v < len(t.Variable) && t.Variable[v] == i {
			b.WriteString(t.DimName(v) + "<=")
			v++
		} else if t.DType == Str && i == len(t.Shape)-1 {
			b.WriteString("<=")
		}
		b.WriteString(strconv.Itoa(d))
	}
	b.WriteByte(']')
	if t.Memory != "" {
		b.WriteByte('@')
		b.WriteString(t.Memory)
	}
	return b.String()
}

// DimName is the name of the v-th variable dimension.
func (t Spec) DimName(v int) string {
	if v < len(t.Names) {
		return t.Names[v]
	}
	return ""
}

// ParseSpec reads name:dtype[dims]. A dimension is a size, or "<=" and the maximum of a
// variable dimension, which may have a name: "atoms<=200". "y:f32[]" is one number per row, "t:str[<=256]" one text.
// "h:f32[0,4]" is an empty state. A suffix names the memory: "@device:0" or "@host".
func ParseSpec(s string) (Spec, error) {
	bad := func(why string) (Spec, error) {
		return Spec{}, fmt.Errorf("%w: tensor %q: %s (want name:dtype[dims], like x:f32[3,224,224] or tokens:i32[<=512])",
			status.ErrInvalid, s, why)
	}
	name, rest, ok := strings.Cut(s, ":")
	if !ok {
		return bad("no colon")
	}
	dt, dims, ok := strings.Cut(rest, "[")
	dims, memory, placed := strings.Cut(dims, "]@")
	if placed {
		dims += "]"
	}
	if !ok || !strings.HasSuffix(dims, "]") {
		return bad("no [dims]")
	}
	d, err := ParseDType(dt)
	if err != nil {
		return bad("unknown dtype " + strconv.Quote(dt))
	}
	t := Spec{Name: name, DType: d, Shape: []int{}}
	if placed {
		if t.Memory, err = ParseMemory(memory); err != nil || memory == "" {
			return bad(strconv.Quote("@"+memory) + " is no memory: host, device or device:N")
		}
	}
	dims = strings.TrimSuffix(dims, "]")
	if dims != "" {
		for i, f := range strings.Split(dims, ",") {
			f = strings.TrimSpace(f)
			if name, rest, ok := strings.Cut(f, "<="); ok {
				t.Variable = append(t.Variable, i)
				t.Names = append(t.Names, strings.TrimSpace(name))
				f = strings.TrimSpace(rest)
			}
			n, err := strconv.Atoi(f)
			if err != nil {
				return bad("dimension " + strconv.Quote(f) + " is not a number")
			}
			t.Shape = append(t.Shape, n)
		}
	}
	if strings.Join(t.Names, "") == "" {
		t.Names = nil
	}
	if last := len(t.Shape) - 1; d == Str {
		if !slices.Equal(t.Variable, []int{last}) || t.Names != nil {
			return bad("a str has its most bytes last, and only them with <=: str[<=256], or str[16,<=256] for 16 texts")
		}
		t.Variable = nil // its memory is fixed
	}
	if err := t.validate(); err != nil {
		return Spec{}, err
	}
	return t, nil
}

// ValidName reports whether a model or a tensor may have that name. Tables and terminals
// show names, so they must be printable.
func ValidName(name string) bool {
	return name != "" && len(name) <= MaxNameBytes && utf8.ValidString(name) &&
		!strings.ContainsFunc(name, func(r rune) bool { return unicode.IsSpace(r) || !unicode.IsPrint(r) })
}

const maxRowBytes = 1 << 36

var dimNames = regexp.MustCompile(fmt.Sprintf(`^[A-Za-z][A-Za-z0-9_]{0,%d}$`, MaxDimNameBytes-1))

func (t Spec) validate() error {
	fail := func(format string, a ...any) error {
		return fmt.Errorf("%w: tensor %q: %s", status.ErrInvalid, t.Name, fmt.Sprintf(format, a...))
	}
	if !ValidName(t.Name) || strings.ContainsAny(t.Name, ":[],") {
		return fail("name must be 1..%d bytes, printable, without : [ ] , or blanks", MaxNameBytes)
	}
	if !t.DType.Valid() {
		return fail("unknown dtype %d", t.DType)
	}
	if len(t.Shape) > MaxRank {
		return fail("%d dimensions, at most %d", len(t.Shape), MaxRank)
	}
	bytes := t.DType.Size()
	for i, d := range t.Shape {
		if d < 0 || d == 0 && (t.DType == Str || slices.Contains(t.Variable, i)) {
			return fail("dimension %d is %d, must be at least 1", i, d)
		}
		if d = max(d, 1); bytes > maxRowBytes/d { // so an empty tensor has sane dimensions, too
			return fail("a row is larger than %d bytes", maxRowBytes)
		}
		bytes *= d
	}
	last := -1
	for _, v := range t.Variable {
		if v <= last || v >= len(t.Shape) {
			return fail("variable dimension %d: must be ascending and below %d", v, len(t.Shape))
		}
		if t.Shape[v] > math.MaxUint32 { // sizes travel as u32
			return fail("variable dimension %d is %d, at most %d", v, t.Shape[v], uint32(math.MaxUint32))
		}
		last = v
	}
	if t.DType == Str && (len(t.Shape) == 0 || last >= 0 || t.Memory != "") {
		return fail("a str has its most bytes last, str[<=256], no variable dimensions, and is in host memory")
	}
	if len(t.Names) != 0 && len(t.Names) != len(t.Variable) {
		return fail("%d names of %d variable dimensions", len(t.Names), len(t.Variable))
	}
	for _, name := range t.Names {
		if name != "" && !dimNames.MatchString(name) {
			return fail("dimension name %q: a letter, then letters, digits and _, %d at most", name, MaxDimNameBytes)
		}
	}
	if t.Memory == "" {
		return nil
	}
	if memory, err := ParseMemory(t.Memory); err != nil || memory != t.Memory {
		return fail("memory %q, must be device:N", t.Memory)
	}
	if len(t.Variable) > 0 {
		return fail("a tensor in device memory has no variable dimensions; declare its largest size, " +
			"and send the true size in a tensor on the host")
	}
	return nil
}

// Validate checks the whole signature. A signature from a peer is validated before it is
// used.
func (s *Signature) Validate() error {
	if len(s.Inputs) == 0 || len(s.Outputs) == 0 || len(s.Inputs)+len(s.Outputs)+len(s.State) > MaxTensors {
		return fmt.Errorf("%w: a model needs at least one input and one output, %d tensors at most", status.ErrInvalid, MaxTensors)
	}
	for _, side := range [][]Spec{s.Inputs, s.Outputs} {
		names, variable := map[string]bool{}, 0
		for _, t := range side {
			if err := t.validate(); err != nil {
				return err
			}
			if t.RowElems() == 0 {
				return fmt.Errorf("%w: tensor %s: a dimension is 0, must be at least 1: only a state may be empty", status.ErrInvalid, t)
			}
			if names[t.Name] {
				return fmt.Errorf("%w: tensor %q appears twice", status.ErrInvalid, t.Name)
			}
			names[t.Name] = true
			variable += len(t.Variable)
		}
		if variable > MaxVariableDims {
			return fmt.Errorf("%w: %d variable dimensions on one side, at most %d", status.ErrInvalid, variable, MaxVariableDims)
		}
	}
	if err := cmp.Or(s.validateState(), s.validateNames()); err != nil {
		return err
	}
	return CheckOneDevice(slices.Concat(s.Inputs, s.Outputs, s.State))
}

func (s *Signature) validateState() error {
	for i, t := range s.State {
		if err := t.validate(); err != nil {
			return err
		}
		switch others := slices.Concat(s.Inputs, s.Outputs, s.State[:i]); {
		case slices.ContainsFunc(others, func(o Spec) bool { return o.Name == t.Name }):
			return fmt.Errorf("%w: the state %q needs a name that no other tensor has", status.ErrInvalid, t.Name)
		case t.DType == Str:
			return fmt.Errorf("%w: the state %s is text; a state has numbers, which begin as zeros", status.ErrInvalid, t)
		case len(t.Variable) > 0:
			return fmt.Errorf("%w: the state %s has a variable dimension; a state has one size", status.ErrInvalid, t)
		case len(t.Shape) == MaxRank:
			return fmt.Errorf("%w: the state %s has %d dimensions, at most %d", status.ErrInvalid, t, MaxRank, MaxRank-1)
		}
	}
	return nil
}

// String lists the tensors: x:f32[4] -> y:f32[2], or x:f32[4] -> y:f32[2] state h:f32[8].
func (s *Signature) String() string {
	text := strings.Join(SpecTexts(s.Inputs), " ") + " -> " + strings.Join(SpecTexts(s.Outputs), " ")
	if len(s.State) > 0 {
		text += " state " + strings.Join(SpecTexts(s.State), " ")
	}
	return text
}

// Equal reports whether both signatures have the same tensors in the same order.
func (s *Signature) Equal(o *Signature) bool { return s.String() == o.String() }

// ParseSpecs reads the texts of tensors. A tensor of known may be given by its name.
func ParseSpecs(texts []string, known []Spec) (specs []Spec, err error) {
	for _, text := range texts {
		i := slices.IndexFunc(known, func(t Spec) bool { return t.Name == text })
		if i >= 0 {
			specs = append(specs, known[i])
			continue
		}
		if len(known) > 0 && !strings.Contains(text, ":") {
			return nil, fmt.Errorf("%w: there is no tensor %q here; there are %s", status.ErrInvalid, text, names(known))
		}
		t, err := ParseSpec(text)
		if err != nil {
			return nil, err
		}
		specs = append(specs, t)
	}
	return specs, nil
}

func names(list []Spec) string {
	var all []string
	for _, t := range list {
		all = append(all, t.Name)
	}
	return strings.Join(all, ", ")
}

// VariableDims counts the variable dimensions of a side.
func VariableDims(side []Spec) int {
	n := 0
	for _, t := range side {
		n += len(t.Variable)
	}
	return n
}

// Actual is the shape with a request's actual sizes. dims has the variable sizes of all
// inputs, or of all outputs; the sizes of this tensor begin at index at.
func (t Spec) Actual(dims []uint32, at int) []int {
	shape := make([]int, len(t.Shape))
	copy(shape, t.Shape)
	for i, v := range t.Variable {
		shape[v] = int(dims[at+i])
	}
	return shape
}

// ParseSignature reads a signature from the compact texts of its tensors.
func ParseSignature(inputs, outputs []string, state ...string) (sig Signature, err error) {
	if sig.Inputs, err = ParseSpecs(inputs, nil); err != nil {
		return sig, err
	}
	if sig.Outputs, err = ParseSpecs(outputs, nil); err != nil {
		return sig, err
	}
	if sig.State, err = ParseSpecs(state, nil); err != nil {
		return sig, err
	}
	return sig, sig.Validate()
}

// SpecTexts are the texts of tensors that ParseSpec reads.
func SpecTexts(specs []Spec) []string {
	texts := make([]string, len(specs))
	for i, t := range specs {
		texts[i] = t.String()
	}
	return texts
}
