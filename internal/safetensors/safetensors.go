// SPDX-License-Identifier: Apache-2.0

// Package safetensors reads .safetensors files: named tensors with a
// JSON header that says where each one lies.
//
//	offset 0     header length n            8 bytes, little endian
//	       8     header                     n bytes of JSON, may end in blanks
//	       8+n   data                       what data_offsets count from
//
//	{"layers.0.weight": {"dtype": "F32", "shape": [4, 3], "data_offsets": [0, 48]}, …,
//	 "__metadata__": {"any": "text"}}
//
// A file is accepted only if its tensors cover the data exactly: inside the file,
// none overlapping, no hole between them, each as long as its shape says. Those
// are the rules of the reference implementation. Nothing is allocated for a
// tensor before its bounds are known to lie in the file.
//
// Tensors are read, not mapped: a file that shrinks under a mapping kills the
// process with SIGBUS, and here it is an error.
package safetensors

import (
	"errors"
	"fmt"
	"io"
	"math"

	"github.com/ringbatch/ringbatch/internal/trust"
)

// Limits on what a header may claim.
const (
	MaxHeaderBytes = 100_000_000 // as in the reference implementation
	MaxRank        = 64
)

var (
	ErrFormat      = errors.New("not a valid safetensors file")
	ErrUnsupported = errors.New("valid safetensors, but not supported")
	ErrNotFound    = errors.New("no such tensor")
)

const metadataKey = "__metadata__"

// Info is a tensor without its data, which lies in C order, little endian.
type Info struct {
	Name  string
	DType string // bool, u8, i8, i16, i32, i64, f16, bf16, f32, f64
	Shape []int  // empty for a scalar
	Bytes int64

	at int64 // from the start of the file
}

// dtypes pairs our names with the file's.
var dtypes = []struct {
	name, file string
	size       int64
}{
	{"bool", "BOOL", 1}, {"u8", "U8", 1}, {"i8", "I8", 1},
	{"i16", "I16", 2}, {"f16", "F16", 2}, {"bf16", "BF16", 2},
	{"i32", "I32", 4}, {"f32", "F32", 4},
	{"f64", "F64", 8}, {"i64", "I64", 8},
}

// sizeOf multiplies without overflowing.
func sizeOf(item int64, shape []int) (int64, error) {
	if len(shape) > MaxRank {
		return 0, fmt.Errorf("%w: %d dimensions, at most %d", ErrFormat, len(shape), MaxRank)
	}
	n := item
	for _, d := range shape {
		if d < 0 {
			return 0, fmt.Errorf("%w: negative size in shape %v", ErrFormat, shape)
		}
		if d > 0 && n > math.MaxInt64/int64(d) {
			return 0, fmt.Errorf("%w: shape %v overflows", ErrFormat, shape)
		}
		n *= int64(d)
	}
	return n, nil
}

// File is an open file whose header has been checked.
type File struct {
	Metadata map[string]string

	r       io.ReaderAt
	tensors []Info // by offset
	index   map[string]int
	close   func() error
}

// Open opens a file and checks its header. Close it after use.
func Open(path string) (*File, error) {
	f, err := trust.Open(path)
	if err != nil {
		return nil, fmt.Errorf("open safetensors: %w", err)
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
		return nil, fmt.Errorf("open safetensors %s: %w", path, err)
	}
	s.close = f.Close
	return s, nil
}

// New reads the header of a file of the given size.
func New(r io.ReaderAt, size int64) (*File, error) {
	tensors, metadata, err := readHeader(r, size)
	if err != nil {
		return nil, err
	}
	f := &File{Metadata: metadata, r: r, tensors: tensors, index: make(map[string]int, len(tensors))}
	for i, t := range tensors {
		f.index[t.Name] = i
	}
	return f, nil
}

// Close closes what Open opened.
func (f *File) Close() error {
	if f.close == nil {
		return nil
	}
	return f.close()
}

// Tensors lists what is in the file, in the order of the data.
func (f *File) Tensors() []Info { return append([]Info(nil), f.tensors...) }

// Info describes one tensor.
func (f *File) Info(name string) (Info, error) {
	i, ok := f.index[name]
	if !ok {
		return Info{}, fmt.Errorf("%w: %q", ErrNotFound, name)
	}
	return f.tensors[i], nil
}

// Reader reads the bytes of one tensor.
func (f *File) Reader(name string) (*io.SectionReader, error) {
	t, err := f.Info(name)
	if err != nil {
		return nil, err
	}
	return io.NewSectionReader(f.r, t.at, t.Bytes), nil
}
