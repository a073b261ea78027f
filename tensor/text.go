// SPDX-License-Identifier: Apache-2.0

package tensor

import (
	"bytes"
	"fmt"
	"unicode/utf8"

	"github.com/ringbatch/ringbatch/status"
)

// A str tensor has texts. The last dimension of its shape is the memory of one text: UTF-8,
// which has no byte 0xff, and such bytes behind a text that is shorter. So rows have one size,
// and texts of all lengths share a request and a batch.
//
//	x:str[<=8]    'h' 'i' ff ff ff ff ff ff
const textEnd = 0xff

// TextBytes is the size of one text's memory in a str tensor, 0 in others.
func (t Spec) TextBytes() int {
	if t.DType != Str {
		return 0
	}
	return t.Shape[len(t.Shape)-1]
}

// PutText writes a text into its memory, of which it may take all bytes. It refuses a text
// that is longer, or not UTF-8.
func PutText(to []byte, text string) error {
	switch {
	case len(text) > len(to):
		return fmt.Errorf("%w: a text of %d bytes, at most %d: shorten it, or declare str[<=%d]", status.ErrSize, len(text), len(to), len(text))
	case !utf8.ValidString(text):
		return fmt.Errorf("%w: a text that is not UTF-8: %.32q; bytes of other kinds are u8", status.ErrDType, text)
	}
	for i := copy(to, text); i < len(to); i++ {
		to[i] = textEnd
	}
	return nil
}

// Text is the text in this memory, without a copy. It returns an error if that is not UTF-8.
func Text(from []byte) ([]byte, error) {
	if end := bytes.IndexByte(from, textEnd); end >= 0 {
		from = from[:end]
	}
	if !utf8.Valid(from) {
		return nil, fmt.Errorf("%w: the text is not UTF-8", status.ErrDType)
	}
	return from, nil
}

// Texts are all texts of a str tensor, row by row.
func Texts(t Tensor) ([]string, error) {
	if t.DType != Str || len(t.Shape) < 2 {
		return nil, fmt.Errorf("%w: tensor %q is %s, not str", status.ErrDType, t.Name, t.DType)
	}
	var all []string
	for i := range t.Rows() {
		row, size := t.Row(i).Data, t.Shape[len(t.Shape)-1]
		for ; len(row) >= size; row = row[size:] {
			text, err := Text(row[:size])
			if err != nil {
				return nil, fmt.Errorf("tensor %q, row %d: %w", t.Name, i, err)
			}
			all = append(all, string(text))
		}
	}
	return all, nil
}

// OfTexts is a tensor with a copy of the texts of whole rows.
func (t Spec) OfTexts(texts []string) (Tensor, error) {
	most := t.TextBytes()
	if most == 0 {
		return Tensor{}, fmt.Errorf("%w: input %q is %s, got text", status.ErrDType, t.Name, t.DType)
	}
	each := t.RowBytes() / most
	if len(texts) == 0 || len(texts)%each != 0 {
		return Tensor{}, fmt.Errorf("%w: %q has rows of %d texts, got %d", status.ErrSize, t.Name, each, len(texts))
	}
	made := Tensor{Name: t.Name, DType: Str, Shape: append([]int{len(texts) / each}, t.Shape...), Data: make([]byte, len(texts)*most)}
	for i, text := range texts {
		if err := PutText(made.Data[i*most:(i+1)*most], text); err != nil {
			return Tensor{}, fmt.Errorf("%q, row %d: %w", t.Name, i/each, err)
		}
	}
	return made, nil
}

// CheckTexts checks memory of a str tensor; others it does not read.
func (t Spec) CheckTexts(rows []byte) (longest int, err error) {
	most := t.TextBytes()
	for at := 0; most > 0 && at < len(rows); at += most {
		text, err := Text(rows[at : at+most])
		if err != nil {
			return 0, fmt.Errorf("%q, row %d: %w", t.Name, at/t.RowBytes(), err)
		}
		longest = max(longest, len(text))
	}
	return longest, nil
}
