// SPDX-License-Identifier: Apache-2.0

package oip

import (
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

// In the protocol a str tensor is of type BYTES: each text behind its length of four bytes. Its
// shape has no dimension for the bytes of a text.

const lengthBytes = 4

// WireRow returns a row's shape as a message has it.
func WireRow(spec *tensor.Spec, row []int) []int {
	if spec.DType == tensor.Str {
		return row[:len(row)-1]
	}
	return row
}

// AppendTexts appends the texts in memory of a str tensor as elements of BYTES.
func AppendTexts(b []byte, spec *tensor.Spec, memory []byte) ([]byte, error) {
	for text := range slices.Chunk(memory, spec.TextBytes()) {
		text, err := tensor.Text(text)
		if err != nil {
			return b, fmt.Errorf("%q: %w", spec.Name, err)
		}
		b = append(binary.LittleEndian.AppendUint32(b, uint32(len(text))), text...)
	}
	return b, nil
}

// Texts are the elements of BYTES in data, which AppendTexts has made.
func Texts(data []byte, each func(text []byte)) {
	for len(data) >= lengthBytes {
		n := int(binary.LittleEndian.Uint32(data))
		each(data[lengthBytes : lengthBytes+n])
		data = data[lengthBytes+n:]
	}
}

// TextSource reads elements of BYTES into memory of a str tensor.
type TextSource struct {
	Src  interface{ ReadFull(p []byte) error }
	Spec *tensor.Spec
	Left *int // bytes of Src
}

// ReadFull reads whole texts.
func (s TextSource) ReadFull(p []byte) error {
	most := s.Spec.TextBytes()
	for to := range slices.Chunk(p, most) {
		var length [lengthBytes]byte
		if err := s.read(length[:]); err != nil {
			return err
		}
		n := binary.LittleEndian.Uint32(length[:])
		if int64(n) > int64(*s.Left) {
			return s.wrong(status.ErrSize, "a text of %d bytes, %d are left; BYTES has a length of 4 bytes before each text", n, *s.Left)
		}
		if int64(n) > int64(most) {
			return s.wrong(status.ErrSize, "a text of %d bytes, at most %d", n, most)
		}
		text := make([]byte, n)
		if err := s.read(text); err != nil {
			return err
		}
		if err := tensor.PutText(to, string(text)); err != nil {
			return fmt.Errorf("tensor %q: %w", s.Spec.Name, err)
		}
	}
	return nil
}

func (s TextSource) read(p []byte) error {
	if len(p) > *s.Left {
		return s.wrong(status.ErrSize, "the contents end inside a text; BYTES has a length of 4 bytes before each text")
	}
	*s.Left -= len(p)
	return s.Src.ReadFull(p)
}

func (s TextSource) wrong(code status.Code, format string, a ...any) error {
	return fmt.Errorf("%w: tensor %q: %s", code, s.Spec.Name, fmt.Sprintf(format, a...))
}
