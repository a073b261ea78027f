// SPDX-License-Identifier: Apache-2.0

package safetensors

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"unicode/utf8"
)

// entry is a tensor in the header, as JSON has it.
type entry struct {
	DType   string  `json:"dtype"`
	Shape   []int   `json:"shape"`
	Offsets []int64 `json:"data_offsets"`
}

func readHeader(r io.ReaderAt, size int64) ([]Info, map[string]string, error) {
	var pre [8]byte
	if size < int64(len(pre)) {
		return nil, nil, fmt.Errorf("%w: %d bytes, shorter than a header length", ErrFormat, size)
	}
	if _, err := r.ReadAt(pre[:], 0); err != nil {
		return nil, nil, fmt.Errorf("read header length: %w", err)
	}
	n := binary.LittleEndian.Uint64(pre[:])
	if n > MaxHeaderBytes {
		return nil, nil, fmt.Errorf("%w: header of %d bytes, at most %d", ErrFormat, n, MaxHeaderBytes)
	}
	dataAt := int64(len(pre)) + int64(n)
	if dataAt > size {
		return nil, nil, fmt.Errorf("%w: header of %d bytes in a file of %d", ErrFormat, n, size)
	}
	text := make([]byte, n)
	if _, err := io.ReadFull(io.NewSectionReader(r, int64(len(pre)), int64(n)), text); err != nil {
		return nil, nil, fmt.Errorf("read header: %w", err)
	}
	tensors, metadata, err := parseHeader(text)
	if err != nil {
		return nil, nil, err
	}
	return tensors, metadata, place(tensors, dataAt, size)
}

// parseHeader walks the top-level object by hand: decoding into a map would
// silently keep the last of two tensors with the same name.
func parseHeader(text []byte) (tensors []Info, metadata map[string]string, err error) {
	if len(text) == 0 || text[0] != '{' {
		return nil, nil, fmt.Errorf("%w: header doesn't start with {", ErrFormat)
	}
	if !utf8.Valid(text) {
		return nil, nil, fmt.Errorf("%w: header is not UTF-8", ErrFormat)
	}
	d := json.NewDecoder(bytes.NewReader(text))
	if _, err := d.Token(); err != nil {
		return nil, nil, fmt.Errorf("%w: %w", ErrFormat, err)
	}
	seen := map[string]bool{}
	for d.More() {
		token, err := d.Token()
		if err != nil {
			return nil, nil, fmt.Errorf("%w: %w", ErrFormat, err)
		}
		name, ok := token.(string)
		if !ok || seen[name] {
			return nil, nil, fmt.Errorf("%w: name %v twice or not text", ErrFormat, token)
		}
		seen[name] = true
		if name == metadataKey {
			if err := d.Decode(&metadata); err != nil {
				return nil, nil, fmt.Errorf("%w: %s: %w", ErrFormat, metadataKey, err)
			}
			continue
		}
		var e entry
		if err := d.Decode(&e); err != nil {
			return nil, nil, fmt.Errorf("%w: tensor %q: %w", ErrFormat, name, err)
		}
		info, err := e.info(name)
		if err != nil {
			return nil, nil, fmt.Errorf("tensor %q: %w", name, err)
		}
		tensors = append(tensors, info)
	}
	if _, err := d.Token(); err != nil {
		return nil, nil, fmt.Errorf("%w: %w", ErrFormat, err)
	}
	if rest := bytes.TrimRight(text[d.InputOffset():], " \t\r\n"); len(rest) > 0 {
		return nil, nil, fmt.Errorf("%w: text after the header's object", ErrFormat)
	}
	return tensors, metadata, nil
}

func (e entry) info(name string) (Info, error) {
	i := Info{Name: name, Shape: e.Shape}
	var item int64
	for _, d := range dtypes {
		if d.file == e.DType {
			i.DType, item = d.name, d.size
		}
	}
	switch {
	case e.DType == "" || e.Shape == nil || len(e.Offsets) != 2:
		return i, fmt.Errorf("%w: needs dtype, shape and two data_offsets", ErrFormat)
	case item == 0:
		return i, fmt.Errorf("%w: dtype %q", ErrUnsupported, e.DType)
	}
	begin, end := e.Offsets[0], e.Offsets[1]
	if begin < 0 || end < begin {
		return i, fmt.Errorf("%w: data_offsets [%d, %d]", ErrFormat, begin, end)
	}
	size, err := sizeOf(item, e.Shape)
	if err != nil {
		return i, err
	}
	if size != end-begin {
		return i, fmt.Errorf("%w: %s of shape %v has %d bytes, data_offsets say %d", ErrFormat, e.DType, e.Shape, size, end-begin)
	}
	i.at, i.Bytes = begin, size
	return i, nil
}

// place sorts tensors by offset, checks that they cover the data exactly, and
// turns offsets into the data into offsets into the file.
func place(tensors []Info, dataAt, size int64) error {
	slices.SortFunc(tensors, func(a, b Info) int {
		return cmp.Or(cmp.Compare(a.at, b.at), cmp.Compare(a.Bytes, b.Bytes), cmp.Compare(a.Name, b.Name))
	})
	end := int64(0)
	for i := range tensors {
		t := &tensors[i]
		if t.at != end {
			return fmt.Errorf("%w: tensor %q starts at %d, the one before ends at %d", ErrFormat, t.Name, t.at, end)
		}
		// Both are at most MaxInt64 and end ≤ the data so far, so no overflow.
		if t.Bytes > size-dataAt-end {
			return fmt.Errorf("%w: tensor %q ends after the file", ErrFormat, t.Name)
		}
		end += t.Bytes
		t.at += dataAt
	}
	if end != size-dataAt {
		return fmt.Errorf("%w: %d bytes of data, tensors cover %d", ErrFormat, size-dataAt, end)
	}
	return nil
}
