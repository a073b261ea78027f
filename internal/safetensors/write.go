// SPDX-License-Identifier: Apache-2.0

package safetensors

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"unicode/utf8"
)

// Write writes the same bytes as the reference implementation: widest items
// first, so that every tensor starts aligned to its items, then by name.
func Write(w io.Writer, tensors []Tensor, metadata map[string]string) error {
	sorted := slices.Clone(tensors)
	slices.SortFunc(sorted, func(a, b Tensor) int {
		return cmp.Or(cmp.Compare(rank(b.DType), rank(a.DType)), cmp.Compare(a.Name, b.Name))
	})
	header, err := header(sorted, metadata)
	if err != nil {
		return fmt.Errorf("write safetensors: %w", err)
	}
	if _, err := w.Write(header); err != nil {
		return fmt.Errorf("write safetensors: %w", err)
	}
	for _, t := range sorted {
		if _, err := w.Write(t.Data); err != nil {
			return fmt.Errorf("write safetensors: tensor %q: %w", t.Name, err)
		}
	}
	return nil
}

func header(tensors []Tensor, metadata map[string]string) ([]byte, error) {
	b := bytes.NewBuffer(make([]byte, 8))
	b.WriteByte('{')
	comma := ""
	put := func(name string, value any) error {
		key, err := marshal(name)
		if err != nil {
			return err
		}
		val, err := marshal(value)
		if err != nil {
			return err
		}
		fmt.Fprintf(b, "%s%s:%s", comma, key, val)
		comma = ","
		return nil
	}
	if len(metadata) > 0 {
		if err := put(metadataKey, metadata); err != nil {
			return nil, err
		}
	}
	end, seen := int64(0), map[string]bool{metadataKey: true}
	for _, t := range tensors {
		e, err := t.entry(end)
		if err != nil {
			return nil, fmt.Errorf("tensor %q: %w", t.Name, err)
		}
		if seen[t.Name] {
			return nil, fmt.Errorf("%w: name %q is taken", ErrFormat, t.Name)
		}
		seen[t.Name] = true
		if err := put(t.Name, e); err != nil {
			return nil, err
		}
		end = e.Offsets[1]
	}
	b.WriteByte('}')
	for b.Len()%8 != 0 { // the data starts aligned to its widest items
		b.WriteByte(' ')
	}
	n := b.Len() - 8
	if n > MaxHeaderBytes {
		return nil, fmt.Errorf("%w: header of %d bytes, at most %d", ErrFormat, n, MaxHeaderBytes)
	}
	binary.LittleEndian.PutUint64(b.Bytes(), uint64(n))
	return b.Bytes(), nil
}

// marshal is json.Marshal without its escapes for HTML.
func marshal(v any) ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		return nil, err
	}
	return bytes.TrimRight(b.Bytes(), "\n"), nil
}

func (t Tensor) entry(at int64) (entry, error) {
	e := entry{Shape: append([]int{}, t.Shape...)}
	i := rank(t.DType)
	if i < 0 {
		return e, fmt.Errorf("%w: dtype %q", ErrUnsupported, t.DType)
	}
	e.DType = dtypes[i].file
	if !utf8.ValidString(t.Name) {
		return e, fmt.Errorf("%w: name is not UTF-8", ErrFormat)
	}
	size, err := sizeOf(dtypes[i].size, t.Shape)
	if err != nil {
		return e, err
	}
	if size != int64(len(t.Data)) {
		return e, fmt.Errorf("%w: %s of shape %v has %d bytes, got %d", ErrFormat, t.DType, t.Shape, size, len(t.Data))
	}
	e.Offsets = []int64{at, at + size}
	return e, nil
}

// Save writes a file whole or not at all: a reader never sees half of it.
func Save(path string, tensors []Tensor, metadata map[string]string) (err error) {
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*")
	if err != nil {
		return fmt.Errorf("save safetensors: %w", err)
	}
	defer func() {
		if err != nil {
			f.Close()
			os.Remove(f.Name())
			err = fmt.Errorf("save safetensors %s: %w", path, err)
		}
	}()
	w := bufio.NewWriterSize(f, 1<<20)
	if err := Write(w, tensors, metadata); err != nil {
		return err
	}
	if err := w.Flush(); err != nil {
		return err
	}
	if err := f.Chmod(0o644); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}
