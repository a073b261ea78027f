// SPDX-License-Identifier: Apache-2.0

package core

import (
	"errors"
	"io"
	"net/http"

	"github.com/ringbatch/ringbatch/gateway/oip"
	"github.com/ringbatch/ringbatch/internal/codec"
)

// source copies an input's bytes, in order, into slot memory.
type source interface {
	ReadFull(p []byte) error
}

// BytesSource is memory.
type BytesSource []byte

func (s *BytesSource) ReadFull(p []byte) error {
	if len(p) > len(*s) {
		return oip.ErrShort
	}
	*s = (*s)[copy(p, *s):]
	return nil
}

// BodySource is an HTTP body, read from the socket into the slot.
type BodySource struct {
	Ahead []byte // read before a slot was claimed
	R     io.Reader
	Open  bool // of unknown length
}

func (s *BodySource) Read(p []byte) (int, error) { return s.R.Read(p) }

func (s *BodySource) Finish() error {
	if !s.Open {
		return nil
	}
	var one [1]byte
	n, err := io.ReadFull(s.R, one[:])
	if n > 0 {
		return BadRequest("the body goes on after its tensors")
	}
	if !errors.Is(err, io.EOF) {
		return bodyError(err)
	}
	return nil
}

func (s *BodySource) ReadFull(p []byte) error {
	n := copy(p, s.Ahead)
	if s.Ahead, p = s.Ahead[n:], p[n:]; len(p) == 0 {
		return nil
	}
	_, err := io.ReadFull(s.R, p)
	return bodyError(err)
}

func bodyError(err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return BadRequest("the body ends early")
	case IsTimeout(err):
		return ErrSlowBody
	}
	var r *Refusal
	var large *http.MaxBytesError
	switch {
	case errors.As(err, &r):
		return err
	case errors.As(err, &large):
		return TooLarge(large.Limit+1, int(large.Limit))
	}
	return BadRequest("reading the body: %v", err)
}

// JSONSource is an input in JSON, decoded straight into the slot.
type JSONSource struct{ *codec.Reader }

func (s JSONSource) ReadFull(p []byte) error { return s.Fill(p) }

func (s JSONSource) Finish() error {
	_, err := s.End()
	return err
}
