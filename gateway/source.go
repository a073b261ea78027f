// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"errors"
	"io"

	"github.com/ringbatch/ringbatch/gateway/oip"
	"github.com/ringbatch/ringbatch/internal/codec"
)

// source gives an input's bytes, in order, into slot memory.
type source interface {
	ReadFull(p []byte) error
}

// bytesSource is memory that is at hand.
type bytesSource []byte

func (s *bytesSource) ReadFull(p []byte) error {
	if len(p) > len(*s) {
		return oip.ErrShort
	}
	*s = (*s)[copy(p, *s):]
	return nil
}

// bodySource is an HTTP body: what it reads goes from the socket into the slot.
type bodySource struct {
	ahead []byte // was read before a slot was claimed
	r     io.Reader
	open  bool // only its end tells how long it is
}

func (s *bodySource) Read(p []byte) (int, error) { return s.r.Read(p) }

func (s *bodySource) finish() error {
	if !s.open {
		return nil
	}
	var one [1]byte
	n, err := io.ReadFull(s.r, one[:])
	if n > 0 {
		return badRequest("the body goes on after its tensors")
	}
	if !errors.Is(err, io.EOF) {
		return bodyError(err)
	}
	return nil
}

func (s *bodySource) ReadFull(p []byte) error {
	n := copy(p, s.ahead)
	if s.ahead, p = s.ahead[n:], p[n:]; len(p) == 0 {
		return nil
	}
	_, err := io.ReadFull(s.r, p)
	return bodyError(err)
}

// bodyError names what went wrong with a body.
func bodyError(err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return badRequest("the body ends early")
	case isTimeout(err):
		return errSlowBody
	}
	var r *refusal
	if errors.As(err, &r) {
		return err
	}
	return badRequest("reading the body: %v", err)
}

// jsonSource is an input whose elements are written in JSON: they are read
// straight into the slot.
type jsonSource struct{ *codec.Reader }

func (s jsonSource) ReadFull(p []byte) error { return s.Fill(p) }

func (s jsonSource) finish() error {
	_, err := s.End()
	return err
}
