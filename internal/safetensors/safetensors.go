// SPDX-License-Identifier: Apache-2.0

// Package safetensors reads .safetensors files: named tensors with a JSON header.
//
//	offset 0     header length n            8 bytes, little endian
//	       8     header                     n bytes of JSON, may end in blanks
//	       8+n   data                       data_offsets count from here
//
//	{"layers.0.weight": {"dtype": "F32", "shape": [4, 3], "data_offsets": [0, 48]}, …, "__metadata__": {"any": "text"}}
//
// Open accepts a file only if its tensors cover the data exactly, as the reference implementation does: inside the file, none
// overlapping, no hole between them, each as long as its shape says. Tensors are read, not mapped: a file that shrinks under a
// mapping kills the process with SIGBUS, and here it is an error.
package safetensors

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"unicode/utf8"
)

// MaxHeaderBytes is the limit of the reference implementation.
const MaxHeaderBytes = 100_000_000

var (
	ErrFormat      = errors.New("not a valid safetensors file")
	ErrUnsupported = errors.New("valid safetensors, but not supported")
	ErrNotFound    = errors.New("no such tensor")
)

// Info is a tensor without its data, which lies in C order, little endian.
type Info struct {
	Name  string
	DType string // bool, u8, i8, i16, i32, i64, f16, bf16, f32, f64
	Shape []int  // empty for a scalar
	Bytes int64

	at int64 // from the start of the file
}

// dtypes pairs the names of files with ours.
var dtypes = map[string]struct {
	name string
	size int64
}{
	"BOOL": {"bool", 1}, "U8": {"u8", 1}, "I8": {"i8", 1}, "I16": {"i16", 2}, "F16": {"f16", 2}, "BF16": {"bf16", 2},
	"I32": {"i32", 4}, "F32": {"f32", 4}, "F64": {"f64", 8}, "I64": {"i64", 8},
}

// File is an open file whose header has been checked.
type File struct {
	Tensors []Info // in the order of the data

	r io.ReaderAt
	c io.Closer
}

// Open opens a file and checks its header. Close it after use.
func Open(path string) (*File, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	stat, err := f.Stat()
	if err == nil && !stat.Mode().IsRegular() {
		err = errors.New("not a regular file")
	}
	var s *File
	if err == nil {
		s, err = New(f, stat.Size())
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	s.c = f
	return s, nil
}

// Close closes the file of Open.
func (f *File) Close() error { return f.c.Close() }

// Info describes one tensor.
func (f *File) Info(name string) (Info, error) {
	for _, t := range f.Tensors {
		if t.Name == name {
			return t, nil
		}
	}
	return Info{}, fmt.Errorf("%w: %q", ErrNotFound, name)
}

// Reader reads the bytes of one tensor.
func (f *File) Reader(name string) (*io.SectionReader, error) {
	t, err := f.Info(name)
	return io.NewSectionReader(f.r, t.at, t.Bytes), err
}

// New reads the header of a file of the given size.
func New(r io.ReaderAt, size int64) (*File, error) {
	var pre [8]byte
	if _, err := r.ReadAt(pre[:], 0); err != nil {
		return nil, fmt.Errorf("%w: the header length: %w", ErrFormat, err)
	}
	n := binary.LittleEndian.Uint64(pre[:])
	if n > MaxHeaderBytes || int64(n) > size-8 {
		return nil, fmt.Errorf("%w: a header of %d bytes in a file of %d", ErrFormat, n, size)
	}
	text := make([]byte, n)
	if _, err := r.ReadAt(text, 8); err != nil && n > 0 {
		return nil, fmt.Errorf("read header: %w", err)
	}
	tensors, err := parseHeader(text)
	if err != nil {
		return nil, err
	}
	return &File{Tensors: tensors, r: r}, placeTensors(tensors, 8+int64(n), size)
}

// parseHeader walks the object by hand: decoding into a map would silently keep the last of two tensors with the same name.
func parseHeader(text []byte) (tensors []Info, err error) {
	if len(text) == 0 || text[0] != '{' || !json.Valid(text) || !utf8.Valid(text) {
		return nil, fmt.Errorf("%w: the header is not a JSON object", ErrFormat)
	}
	d := json.NewDecoder(bytes.NewReader(text))
	_, _ = d.Token()
	seen := map[string]bool{}
	for d.More() {
		token, _ := d.Token() // valid JSON: it is a name
		name := token.(string)
		if seen[name] {
			return nil, fmt.Errorf("%w: name %q twice", ErrFormat, name)
		}
		seen[name] = true
		if name == "__metadata__" {
			var ignored map[string]string
			if err := d.Decode(&ignored); err != nil {
				return nil, fmt.Errorf("%w: %s: %w", ErrFormat, name, err)
			}
			continue
		}
		t, err := decodeTensor(d, name)
		if err != nil {
			return nil, err
		}
		tensors = append(tensors, t)
	}
	return tensors, nil
}

func decodeTensor(d *json.Decoder, name string) (Info, error) {
	var e struct {
		DType   string  `json:"dtype"`
		Shape   []int   `json:"shape"`
		Offsets []int64 `json:"data_offsets"`
	}
	if err := d.Decode(&e); err != nil {
		return Info{}, fmt.Errorf("%w: tensor %q: %w", ErrFormat, name, err)
	}
	if e.DType == "" || e.Shape == nil || len(e.Offsets) != 2 || e.Offsets[0] < 0 || e.Offsets[1] < e.Offsets[0] {
		return Info{}, fmt.Errorf("%w: tensor %q needs dtype, shape and two data_offsets", ErrFormat, name)
	}
	dtype, ok := dtypes[e.DType]
	if !ok {
		return Info{}, fmt.Errorf("%w: tensor %q: dtype %q", ErrUnsupported, name, e.DType)
	}
	size := dtype.size
	for _, n := range e.Shape {
		if n < 0 || n > 0 && size > math.MaxInt64/int64(n) {
			return Info{}, fmt.Errorf("%w: tensor %q: shape %v", ErrFormat, name, e.Shape)
		}
		size *= int64(n)
	}
	if size != e.Offsets[1]-e.Offsets[0] {
		return Info{}, fmt.Errorf("%w: tensor %q: %s of shape %v has %d bytes, data_offsets differ", ErrFormat, name, e.DType, e.Shape, size)
	}
	return Info{Name: name, DType: dtype.name, Shape: e.Shape, Bytes: size, at: e.Offsets[0]}, nil
}

// placeTensors sorts tensors by offset, checks that they cover the data exactly, and turns offsets into the data into offsets
// into the file.
func placeTensors(tensors []Info, dataAt, size int64) error {
	slices.SortFunc(tensors, func(a, b Info) int {
		return cmp.Or(cmp.Compare(a.at, b.at), cmp.Compare(a.Bytes, b.Bytes), cmp.Compare(a.Name, b.Name))
	})
	end := int64(0)
	for i := range tensors {
		t := &tensors[i]
		if t.at != end || t.Bytes > size-dataAt-end { // no sum can overflow: end lies inside the file
			return fmt.Errorf("%w: tensor %q overlaps another, leaves a hole, or ends after the file", ErrFormat, t.Name)
		}
		end += t.Bytes
		t.at += dataAt
	}
	if end != size-dataAt {
		return fmt.Errorf("%w: %d bytes of data, tensors cover %d", ErrFormat, size-dataAt, end)
	}
	return nil
}
