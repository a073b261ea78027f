// SPDX-License-Identifier: Apache-2.0

package npy

import (
	"encoding/binary"
	"fmt"
	"io"
	"strconv"
	"strings"
)

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
