// SPDX-License-Identifier: Apache-2.0

// Package npy reads and writes NumPy's .npy files: one array, in C order, little endian, of
// a plain number type. It refuses other files with a named error (see the Err
// variables), and it trusts no length in a file.
//
//	offset 0   "\x93NUMPY"
//	       6   major, minor version        1.0, 2.0 or 3.0
//	       8   header length               2 bytes in version 1, else 4; little endian
//	      10 / 12   header                 a Python dict literal, padded with blanks, "\n" at the end
//	      then      data                   product(shape) items, nothing else
package npy

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
)

// Limits of a header.
const (
	MaxHeaderBytes = 64 << 10 // numpy itself refuses above 10,000
	MaxRank        = 64       // as in numpy 2
)

// Magic is the beginning of a .npy file.
const Magic = "\x93NUMPY"

var (
	ErrFormat      = errors.New("not a valid .npy file")
	ErrUnsupported = errors.New("valid .npy, but not supported")
	ErrTooLarge    = errors.New("array over the limit")
	ErrTruncated   = errors.New("file ends too early")
)

// Array is an array in C order, little endian.
type Array struct {
	DType string // bool, u8, i8, i16, i32, i64, f16, f32, f64
	Shape []int  // empty for a scalar
	Data  []byte
}

// dtypes pairs our names with numpy's, and the size of an item.
var dtypes = []struct {
	name, descr string
	size        int
}{
	{"bool", "|b1", 1},
	{"u8", "|u1", 1}, {"i8", "|i1", 1},
	{"i16", "<i2", 2}, {"i32", "<i4", 4}, {"i64", "<i8", 8},
	{"f16", "<f2", 2}, {"f32", "<f4", 4}, {"f64", "<f8", 8},
}

// Size is the number of bytes of the data, by dtype and shape.
func (a Array) Size() (int, error) {
	if len(a.Shape) > MaxRank {
		return 0, fmt.Errorf("%w: %d dimensions, at most %d", ErrFormat, len(a.Shape), MaxRank)
	}
	n := 0
	for _, d := range dtypes {
		if d.name == a.DType {
			n = d.size
		}
	}
	if n == 0 {
		return 0, fmt.Errorf("%w: dtype %q", ErrUnsupported, a.DType)
	}
	for _, d := range a.Shape {
		if d < 0 {
			return 0, fmt.Errorf("%w: negative size in shape %v", ErrFormat, a.Shape)
		}
	}
	// An empty array is empty, however large its other dimensions are.
	if slices.Contains(a.Shape, 0) {
		return 0, nil
	}
	for _, d := range a.Shape {
		if n > math.MaxInt/d {
			return 0, fmt.Errorf("%w: shape %v overflows", ErrTooLarge, a.Shape)
		}
		n *= d
	}
	return n, nil
}

// Read reads one array with at most limit bytes of data. It reads no further, so that a
// stream may have several arrays.
func Read(r io.Reader, limit int64) (Array, error) {
	a, err := read(r, limit)
	if err != nil {
		return Array{}, fmt.Errorf("read npy: %w", err)
	}
	return a, nil
}

func read(r io.Reader, limit int64) (Array, error) {
	text, err := readHeader(r)
	if err != nil {
		return Array{}, err
	}
	a, err := parseHeader(text)
	if err != nil {
		return Array{}, err
	}
	size, err := a.Size()
	if err != nil {
		return Array{}, err
	}
	if int64(size) > limit {
		return Array{}, fmt.Errorf("%w: %d bytes, at most %d", ErrTooLarge, size, limit)
	}
	a.Data, err = readData(r, size)
	return a, err
}

func readHeader(r io.Reader) (string, error) {
	var pre [12]byte
	if err := readFull(r, pre[:10], "preamble"); err != nil {
		return "", err
	}
	if string(pre[:6]) != Magic {
		return "", fmt.Errorf("%w: no NUMPY magic", ErrFormat)
	}
	var n int
	switch major, minor := pre[6], pre[7]; {
	case minor != 0 || major < 1 || major > 3:
		return "", fmt.Errorf("%w: version %d.%d", ErrUnsupported, major, minor)
	case major == 1:
		n = int(binary.LittleEndian.Uint16(pre[8:]))
	default:
		if err := readFull(r, pre[10:12], "preamble"); err != nil {
			return "", err
		}
		// Compared before the conversion: int may have 32 bits.
		u := binary.LittleEndian.Uint32(pre[8:])
		n = int(min(u, MaxHeaderBytes+1))
	}
	if n > MaxHeaderBytes {
		return "", fmt.Errorf("%w: header over %d bytes", ErrTooLarge, MaxHeaderBytes)
	}
	text := make([]byte, n)
	if err := readFull(r, text, "header"); err != nil {
		return "", err
	}
	return string(text), nil
}

// readData grows its buffer as bytes arrive: a header that promises gigabytes in a short
// file costs no gigabytes.
func readData(r io.Reader, size int) ([]byte, error) {
	const first = 1 << 20
	data := make([]byte, min(size, first))
	for at := 0; ; {
		n, err := io.ReadFull(r, data[at:])
		at += n
		switch {
		case err == io.EOF || err == io.ErrUnexpectedEOF:
			return nil, fmt.Errorf("%w: %d of %d bytes of data", ErrTruncated, at, size)
		case err != nil:
			return nil, fmt.Errorf("data: %w", err)
		case at == size:
			return data, nil
		}
		grown := make([]byte, at+min(at, size-at))
		copy(grown, data)
		data = grown
	}
}

func readFull(r io.Reader, b []byte, what string) error {
	_, err := io.ReadFull(r, b)
	if err == io.EOF || err == io.ErrUnexpectedEOF {
		return fmt.Errorf("%w: in the %s", ErrTruncated, what)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return nil
}
