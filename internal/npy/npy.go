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
	"regexp"
	"slices"
	"strconv"
	"strings"
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
func Read(r io.Reader, limit int64) (a Array, err error) {
	defer func() {
		if err != nil {
			a, err = Array{}, fmt.Errorf("read npy: %w", err)
		}
	}()
	text, err := readHeader(r)
	if err != nil {
		return a, err
	}
	if a, err = parseHeader(text); err != nil {
		return a, err
	}
	size, err := a.Size()
	if err != nil {
		return a, err
	}
	if int64(size) > limit {
		return a, fmt.Errorf("%w: %d bytes, at most %d", ErrTooLarge, size, limit)
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
	switch {
	case err == io.EOF || err == io.ErrUnexpectedEOF:
		return fmt.Errorf("%w: in the %s", ErrTruncated, what)
	case err != nil:
		return fmt.Errorf("%s: %w", what, err)
	}
	return nil
}

// The header is a Python dict literal. This reads the subset that NumPy writes:
//
//	{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }
//
// in any order of keys, with either quote, blanks anywhere. Python 2 wrote sizes as 3L.
const (
	pair  = `\s*['"](\w+)['"]\s*:\s*(['"][^'"\\\n]*['"]|\w+|\[.*\]|\(` + sizes + `\))\s*`
	sizes = `(?:\s*\d+L?\s*,)*(?:\s*\d+L?)?\s*`
)

var (
	wholeHeader = regexp.MustCompile(`^\s*\{` + pair + `(?:,` + pair + `)*,?\s*\}\s*$`)
	headerPair  = regexp.MustCompile(pair)
	shapeSize   = regexp.MustCompile(`\d+`)
)

func parseHeader(text string) (Array, error) {
	var a Array
	fail := func(format string, args ...any) (Array, error) {
		return a, fmt.Errorf("%w: header: %s", ErrFormat, fmt.Sprintf(format, args...))
	}
	if !wholeHeader.MatchString(text) {
		return fail("not a dict of 'descr', 'fortran_order' and 'shape'")
	}
	values := map[string]string{}
	for _, m := range headerPair.FindAllStringSubmatch(text, -1) {
		if _, twice := values[m[1]]; twice {
			return fail("key %q twice", m[1])
		}
		values[m[1]] = m[2]
	}
	descr, order, shape := values["descr"], values["fortran_order"], values["shape"]
	switch {
	case len(values) != 3 || descr == "" || order != "True" && order != "False" || !strings.HasPrefix(shape, "("):
		return fail("not a dict of 'descr', 'fortran_order' and 'shape'")
	case order == "True":
		return a, fmt.Errorf("%w: fortran_order; convert with numpy.ascontiguousarray", ErrUnsupported)
	case strings.HasPrefix(descr, "["):
		return a, fmt.Errorf("%w: structured dtype", ErrUnsupported)
	}
	a.Shape = []int{}
	for _, digits := range shapeSize.FindAllString(shape, -1) {
		n, err := strconv.Atoi(digits)
		if err != nil {
			return fail("bad size in shape")
		}
		a.Shape = append(a.Shape, n)
	}
	if len(a.Shape) == 1 && !strings.Contains(shape, ",") {
		return fail("shape is no tuple") // in Python, (1) is a number
	}
	var err error
	a.DType, err = parseDType(strings.Trim(descr, `'"`))
	return a, err
}

func parseDType(descr string) (string, error) {
	for _, d := range dtypes {
		if d.descr == descr {
			return d.name, nil
		}
		if strings.HasPrefix(descr, ">") && d.size > 1 && d.descr[1:] == descr[1:] {
			return "", fmt.Errorf("%w: big endian dtype %q; convert with a.astype(a.dtype.newbyteorder('<'))", ErrUnsupported, descr)
		}
	}
	return "", fmt.Errorf("%w: dtype %q", ErrUnsupported, descr)
}

// Write writes the array as version 1.0, byte for byte as numpy.save does.
func Write(w io.Writer, a Array) error {
	size, err := a.Size()
	if err != nil {
		return fmt.Errorf("write npy: %w", err)
	}
	if size != len(a.Data) {
		return fmt.Errorf("write npy: %w: %s of shape %v has %d bytes, got %d", ErrFormat, a.DType, a.Shape, size, len(a.Data))
	}
	if _, err := w.Write(header(a)); err != nil {
		return fmt.Errorf("write npy: header: %w", err)
	}
	if _, err := w.Write(a.Data); err != nil {
		return fmt.Errorf("write npy: data: %w", err)
	}
	return nil
}

func header(a Array) []byte {
	const (
		preamble = 10
		align    = 64 // of the data, so that a mapped file has aligned items
		growth   = 21 // NumPy leaves room for the first size to grow in place
	)
	var text strings.Builder
	for _, d := range dtypes {
		if d.name == a.DType {
			fmt.Fprintf(&text, "{'descr': '%s', 'fortran_order': False, 'shape': %s, }", d.descr, tuple(a.Shape))
		}
	}
	if len(a.Shape) > 0 {
		text.WriteString(strings.Repeat(" ", growth-len(strconv.Itoa(a.Shape[0]))))
	}
	// MaxRank sizes of 19 digits stay far below the 65,535 of version 1.
	// Like NumPy, a header that already ends on the boundary gets 64 blanks more.
	total := (preamble+text.Len()+1)/align*align + align
	b := append(make([]byte, 0, total), Magic+"\x01\x00"...)
	b = binary.LittleEndian.AppendUint16(b, uint16(total-preamble))
	b = append(b, text.String()...)
	for len(b) < total-1 {
		b = append(b, ' ')
	}
	return append(b, '\n')
}

func tuple(shape []int) string {
	parts := make([]string, len(shape))
	for i, d := range shape {
		parts[i] = strconv.Itoa(d)
	}
	if len(parts) == 1 {
		return "(" + parts[0] + ",)"
	}
	return "(" + strings.Join(parts, ", ") + ")"
}
