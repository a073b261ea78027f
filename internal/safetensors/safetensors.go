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

	"github.com/ringbatch/ringbatch/internal/trust"
)

// MaxHeaderBytes is the limit of the reference implementation.
const MaxHeaderBytes = 100_000_000

var (
	ErrFormat      = errors.New("not a valid safetensors file")
	ErrUnsupported = errors.New("valid safetensors, but not supported")
)

// Info is a tensor without its data. The data is in C order, little endian.
type Info struct {
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
	Tensors map[string]Info

	r io.ReaderAt
	c io.Closer
}

// Open opens a file and checks its header. Close it after use.
func Open(path string) (*File, error) {
	if about, err := os.Stat(path); err == nil && !about.Mode().IsRegular() { // a pipe would open when it has a writer
		return nil, errors.New("not a regular file")
	}
	f, err := trust.Open(path)
	if err != nil {
		return nil, err
	}
	stat, err := f.Stat()
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

// Reader reads the bytes of one tensor.
func (f *File) Reader(name string) *io.SectionReader {
	t := f.Tensors[name]
	return io.NewSectionReader(f.r, t.at, t.Bytes)
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
	var entries map[string]entry
	if err := json.Unmarshal(text, &entries); err != nil || text[0] != '{' || !utf8.Valid(text) {
		return nil, fmt.Errorf("%w: the header is no JSON object of tensors: %v", ErrFormat, err)
	}
	delete(entries, "__metadata__")
	f := &File{Tensors: map[string]Info{}, r: r}
	var all []Info
	for name, e := range entries {
		t, err := e.info()
		if err != nil {
			return nil, fmt.Errorf("tensor %q: %w", name, err)
		}
		all = append(all, t)
		t.at += 8 + int64(n)
		f.Tensors[name] = t
	}
	return f, checkCover(all, size-8-int64(n))
}

// entry is a tensor in the header.
type entry struct {
	DType   string  `json:"dtype"`
	Shape   []int   `json:"shape"`
	Offsets []int64 `json:"data_offsets"`
}

func (e *entry) info() (Info, error) {
	if e.DType == "" || e.Shape == nil || len(e.Offsets) != 2 || e.Offsets[0] < 0 || e.Offsets[1] < e.Offsets[0] {
		return Info{}, fmt.Errorf("%w: it needs dtype, shape and two data_offsets", ErrFormat)
	}
	dtype, ok := dtypes[e.DType]
	if !ok {
		return Info{}, fmt.Errorf("%w: dtype %q", ErrUnsupported, e.DType)
	}
	size := dtype.size
	for _, n := range e.Shape {
		if n < 0 || n > 0 && size > math.MaxInt64/int64(n) {
			return Info{}, fmt.Errorf("%w: shape %v", ErrFormat, e.Shape)
		}
		size *= int64(n)
	}
	if size != e.Offsets[1]-e.Offsets[0] {
		return Info{}, fmt.Errorf("%w: %s of shape %v has %d bytes, data_offsets differ", ErrFormat, e.DType, e.Shape, size)
	}
	return Info{DType: dtype.name, Shape: e.Shape, Bytes: size, at: e.Offsets[0]}, nil
}

// checkCover checks that the tensors cover the data exactly.
func checkCover(all []Info, size int64) error {
	slices.SortFunc(all, func(a, b Info) int { return cmp.Or(cmp.Compare(a.at, b.at), cmp.Compare(a.Bytes, b.Bytes)) })
	end := int64(0)
	for _, t := range all {
		if t.at != end || t.Bytes > size-end { // no sum can overflow: end lies inside the file
			return fmt.Errorf("%w: tensors overlap, leave a hole, or end after the file", ErrFormat)
		}
		end += t.Bytes
	}
	if end != size {
		return fmt.Errorf("%w: %d bytes of data, tensors cover %d", ErrFormat, size, end)
	}
	return nil
}
