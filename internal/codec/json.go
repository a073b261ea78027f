// SPDX-License-Identifier: Apache-2.0

package codec

import (
	"encoding/json"
	"fmt"

	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

// Reader reads the elements of one tensor from a JSON array, flat or nested like the
// tensor's shape. It allocates only for errors.
//
// JSON has no NaN and no infinities. For floats, Reader accepts NaN, Infinity and
// -Infinity, with or without quotes. It refuses null, which is more often a missing
// value than a number.
type Reader struct {
	cursor
	dtype tensor.DType
	shape []int

	TextBytes int // of a str tensor: the memory of one text

	nested  bool
	started bool
	depth   int   // open lists
	items   []int // items of each open list so far
	room    [8 + 1]int
	read    int // elements so far
}

// NewReader returns a Reader of the array at the start of text. The first size of shape is
// the number of rows; a str tensor has no dimension for the bytes of a text there. The Reader keeps shape and text.
func NewReader(text []byte, d tensor.DType, shape []int) *Reader {
	r := &Reader{cursor: cursor{text: text}, dtype: d, shape: shape}
	r.items = r.room[:]
	if len(shape) > len(r.items) {
		r.items = make([]int, len(shape))
	}
	return r
}

// Fill reads as many elements as fit into p. If rows are not contiguous in memory, the
// caller calls Fill for each row.
func (r *Reader) Fill(p []byte) error {
	size := max(r.dtype.Size(), r.TextBytes)
	for ; len(p) >= size; p = p[size:] {
		word, err := r.next()
		if err != nil {
			return err
		}
		if word == nil {
			return fmt.Errorf("%w: %d elements, the shape %v has more", status.ErrSize, r.read, r.shape)
		}
		if err := r.put(p[:size], word); err != nil {
			return fmt.Errorf("element %d: %w", r.read, err)
		}
		r.read++
	}
	return nil
}

// End returns the length of the array in the text. It fails if the array has more elements.
func (r *Reader) End() (int, error) {
	word, err := r.next()
	if err != nil {
		return r.at, err
	}
	if word != nil {
		return r.at, fmt.Errorf("%w: more than the %d elements of the shape %v", status.ErrSize, r.read, r.shape)
	}
	return r.at, nil
}

// put is Put with the syntax of JSON.
func (r *Reader) put(p, word []byte) error {
	if r.dtype == tensor.Str {
		return tensor.PutText(p, string(word))
	}
	special := isFloat(r.dtype) && (string(word) == "NaN" || string(word) == "Infinity" || string(word) == "-Infinity")
	if r.dtype != tensor.Bool && !special && !IsNumber(word) { // Put checks the words of a bool
		return fmt.Errorf("%w: %.32q is no %s: want a number", status.ErrDType, word, r.dtype)
	}
	return Put(p, r.dtype, word)
}

// next is the text of the next element, or nil at the end of the array.
func (r *Reader) next() ([]byte, error) {
	if r.started && r.depth == 0 {
		return nil, nil
	}
	if r.started && r.items[r.depth-1] > 0 {
		if done, err := r.endItem(); done || err != nil {
			return nil, err
		}
	}
	for {
		switch c := r.peek(); {
		case c == '[':
			if r.started && r.items[r.depth-1] == 0 && r.depth == 1 && r.read == 0 {
				r.nested = true
			}
			if r.started && (!r.nested || r.depth == len(r.shape)) || len(r.shape) == 0 {
				return nil, r.bad("a list too deep")
			}
			if r.started {
				r.items[r.depth-1]++
			}
			r.at++
			r.items[r.depth] = 0
			r.depth++
			r.started = true
		case !r.started:
			return nil, r.bad("expected a list")
		case c == ']' && r.items[r.depth-1] == 0: // an empty list
			if done, err := r.endItem(); done || err != nil {
				return nil, err
			}
		case c == 0:
			return nil, r.bad("the text ends inside the list")
		default:
			if r.nested && r.depth != len(r.shape) {
				return nil, fmt.Errorf("%w: an element in %d lists, the shape %v has %d dimensions", status.ErrShape,
					r.depth, r.shape, len(r.shape))
			}
			r.items[r.depth-1]++
			return r.word()
		}
	}
}

// endItem steps over a comma after an item, and out of the lists that end after it. done
// reports the end of the outermost list.
func (r *Reader) endItem() (done bool, err error) {
	for {
		switch r.peek() {
		case ',':
			if r.items[r.depth-1] == 0 {
				return false, r.bad("a comma before the first element")
			}
			r.at++
			if c := r.peek(); c == ']' || c == ',' {
				return false, r.bad("expected an element")
			}
			return false, nil
		case ']':
			n := r.items[r.depth-1]
			if r.nested && n != r.shape[r.depth-1] {
				return false, fmt.Errorf("%w: a list of %d, the shape is %v", status.ErrShape, n, r.shape)
			}
			r.at++
			r.depth--
			if r.depth == 0 {
				return true, nil
			}
		case 0:
			return false, r.bad("the text ends inside the list")
		default:
			return false, r.bad("expected ',' or ']'")
		}
	}
}

// word reads up to the next separator, without quotes.
func (r *Reader) word() ([]byte, error) {
	quoted := r.text[r.at] == '"'
	if r.dtype == tensor.Str {
		s := NewScanner(r.text[r.at:])
		if !quoted {
			return nil, fmt.Errorf("%w: element %d begins with %q: want a string", status.ErrDType, r.read, r.text[r.at])
		}
		text := s.Text()
		r.at += s.at
		return text, s.Err()
	}
	if quoted {
		r.at++
	}
	from := r.at
	for r.at < len(r.text) {
		switch r.text[r.at] {
		case '"':
			if !quoted {
				return nil, r.bad("a quote in a number")
			}
			word := r.text[from:r.at]
			r.at++
			if s := string(word); s != "NaN" && s != "Infinity" && s != "-Infinity" {
				return nil, fmt.Errorf("%w: element %d is the string %.32q", status.ErrDType, r.read, word)
			}
			return word, nil
		case ',', ']', '[', ' ', '\t', '\n', '\r', '{', '}', ':':
			if !quoted {
				if r.at == from {
					return nil, r.bad("expected a number")
				}
				return r.text[from:r.at], nil
			}
		}
		r.at++
	}
	return nil, r.bad("the text ends inside the list")
}

func (r *Reader) bad(what string) error { return errorAt(what, r.at) }

// IsNumber reports whether w is a number of JSON.
func IsNumber(w []byte) bool {
	i := 0
	digits := func() bool {
		from := i
		for i < len(w) && w[i] >= '0' && w[i] <= '9' {
			i++
		}
		return i > from
	}
	if i < len(w) && w[i] == '-' {
		i++
	}
	if i < len(w) && w[i] == '0' {
		i++
	} else if !digits() {
		return false
	}
	if i < len(w) && w[i] == '.' {
		if i++; !digits() {
			return false
		}
	}
	if i < len(w) && (w[i] == 'e' || w[i] == 'E') {
		if i++; i < len(w) && (w[i] == '+' || w[i] == '-') {
			i++
		}
		if !digits() {
			return false
		}
	}
	return i == len(w)
}

// AppendJSON appends the elements of data as JSON, with commas between them and without
// brackets, so that callers can append several rows. Numbers that JSON lacks become the
// strings "NaN", "Infinity" or "-Infinity", which Reader accepts, or null.
func AppendJSON(b []byte, d tensor.DType, data []byte, null bool) []byte {
	size := d.Size()
	for i := 0; i+size <= len(data); i += size {
		if i > 0 {
			b = append(b, ',')
		}
		from := len(b)
		b = Append(b, d, data[i:])
		if last := b[len(b)-1]; (last == 'N' || last == 'y') && d != tensor.Bool { // NaN, Infinity
			word := string(b[from:])
			if b = b[:from]; null {
				b = append(b, "null"...)
			} else {
				b = append(append(append(b, '"'), word...), '"')
			}
		}
	}
	return b
}

// MaxJSONBytes is an upper bound for the bytes that AppendJSON appends for one element and
// its comma, or AppendString for one byte.
func MaxJSONBytes(d tensor.DType) int { return mostDigits[d] }

var mostDigits = [...]int{tensor.Bool: 6, tensor.U8: 4, tensor.I8: 5, tensor.I16: 7, tensor.I32: 12, tensor.I64: 21,
	tensor.F16: 25, tensor.BF16: 25, tensor.F32: 25, tensor.F64: 26, tensor.Str: 6, tensor.F8E4M3FN: 25, tensor.F8E5M2: 25}

// AppendString appends a string of JSON.
func AppendString(b []byte, s string) []byte {
	for i := range len(s) {
		if c := s[i]; c < ' ' || c > '~' || c == '"' || c == '\\' {
			text, _ := json.Marshal(s)
			return append(b, text...)
		}
	}
	return append(append(append(b, '"'), s...), '"')
}
