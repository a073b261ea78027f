// SPDX-License-Identifier: Apache-2.0

package tensor

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/ringbatch/ringbatch/status"
)

// Spec describes one row of a tensor: the batch dimension is not part
// of it.
type Spec struct {
	Name  string `msgpack:"name"`
	DType DType  `msgpack:"dtype"`
	Shape []int  `msgpack:"shape"` // the maximum size of each dimension
	// Variable lists, ascending, which dimensions carry each request's
	// actual size (0..Shape[i]); the others are fixed.
	Variable []int `msgpack:"variable,omitempty"`
	// Memory is where the rows lie: "" on the host, "device:N" on a GPU, the
	// N-th in the eyes of the worker that allocates the ring's device memory.
	Memory string `msgpack:"memory,omitempty"`
}

// Signature is what a model takes and gives.
type Signature struct {
	Inputs  []Spec `msgpack:"inputs"`
	Outputs []Spec `msgpack:"outputs"`
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
			b.WriteString("<=")
			v++
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

// ParseSpec reads name:dtype[dims], where a dimension is a size, or
// "<=" and a maximum for a variable one. "y:f32[]" is one number per row. Behind
// it may stand where it lies: "@device:0" (or "@host").
func ParseSpec(s string) (Spec, error) {
	bad := func(why string) (Spec, error) {
		return Spec{}, fmt.Errorf("%w: tensor %q: %s (want name:dtype[dims], like x:f32[3,224,224] or tokens:i32[<=512])", status.ErrInvalid, s, why)
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
			if rest, ok := strings.CutPrefix(f, "<="); ok {
				t.Variable = append(t.Variable, i)
				f = strings.TrimSpace(rest)
			}
			n, err := strconv.Atoi(f)
			if err != nil {
				return bad("dimension " + strconv.Quote(f) + " is not a number")
			}
			t.Shape = append(t.Shape, n)
		}
	}
	if err := t.validate(); err != nil {
		return Spec{}, err
	}
	return t, nil
}

// ValidName tells whether a model or a tensor may be called that: names are
// printed, in tables and on terminals.
func ValidName(name string) bool {
	return name != "" && len(name) <= MaxNameBytes && utf8.ValidString(name) &&
		!strings.ContainsFunc(name, func(r rune) bool { return unicode.IsSpace(r) || !unicode.IsPrint(r) })
}

const maxRowBytes = 1 << 36

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
		if d < 1 {
			return fail("dimension %d is %d, must be at least 1", i, d)
		}
		if bytes > maxRowBytes/d {
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
	if t.Memory == "" {
		return nil
	}
	if memory, err := ParseMemory(t.Memory); err != nil || memory != t.Memory {
		return fail("memory %q, must be device:N", t.Memory)
	}
	if len(t.Variable) > 0 {
		return fail("a tensor in device memory has no variable dimensions; declare its largest size, and tell the true one in a tensor on the host")
	}
	return nil
}

// Validate checks the signature as a whole; everything that was received from
// a peer passes here before its numbers are used.
func (s *Signature) Validate() error {
	if len(s.Inputs) == 0 || len(s.Outputs) == 0 || len(s.Inputs)+len(s.Outputs) > MaxTensors {
		return fmt.Errorf("%w: a model needs at least one input and one output, %d tensors at most", status.ErrInvalid, MaxTensors)
	}
	for _, side := range [][]Spec{s.Inputs, s.Outputs} {
		names, variable := map[string]bool{}, 0
		for _, t := range side {
			if err := t.validate(); err != nil {
				return err
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
	return CheckOneDevice(slices.Concat(s.Inputs, s.Outputs))
}

// String lists the tensors: x:f32[4] -> y:f32[2].
func (s *Signature) String() string {
	var b strings.Builder
	for i, t := range s.Inputs {
		if i > 0 {
			b.WriteByte(' ')
		}
		b.WriteString(t.String())
	}
	b.WriteString(" ->")
	for _, t := range s.Outputs {
		b.WriteByte(' ')
		b.WriteString(t.String())
	}
	return b.String()
}

// Equal reports whether two signatures describe the same tensors in the same
// order.
func (s *Signature) Equal(o *Signature) bool { return s.String() == o.String() }

// ParseSpecs reads tensors where those of known need only their names.
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

// Actual puts a request's actual sizes into the spec's shape: dims holds the
// variable sizes of the whole side, and at is where this tensor's begin.
func (t Spec) Actual(dims []uint32, at int) []int {
	shape := make([]int, len(t.Shape))
	copy(shape, t.Shape)
	for i, v := range t.Variable {
		shape[v] = int(dims[at+i])
	}
	return shape
}

// ParseSignature reads both sides of a signature from their compact texts.
func ParseSignature(inputs, outputs []string) (sig Signature, err error) {
	if sig.Inputs, err = parseSpecs(inputs); err != nil {
		return sig, err
	}
	if sig.Outputs, err = parseSpecs(outputs); err != nil {
		return sig, err
	}
	return sig, sig.Validate()
}

func parseSpecs(texts []string) ([]Spec, error) {
	specs := make([]Spec, len(texts))
	for i, t := range texts {
		var err error
		if specs[i], err = ParseSpec(t); err != nil {
			return nil, err
		}
	}
	return specs, nil
}

// SpecTexts is the way back, for one side.
func SpecTexts(specs []Spec) []string {
	texts := make([]string, len(specs))
	for i, t := range specs {
		texts[i] = t.String()
	}
	return texts
}
