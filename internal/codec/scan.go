// SPDX-License-Identifier: Apache-2.0

package codec

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/ringbatch/ringbatch/status"
)

// Scanner walks over a JSON text in memory and allocates nothing for skipped members.
// Errors are sticky: after an error, all methods return zero values.
type Scanner struct {
	cursor
	err error
}

// NewScanner returns a Scanner of text, which it keeps.
func NewScanner(text []byte) *Scanner { return &Scanner{cursor: cursor{text: text}} }

// Err is the first error.
func (s *Scanner) Err() error { return s.err }

// cursor is a place in a JSON text.
type cursor struct {
	text []byte
	at   int
}

// maxDepth bounds the nesting of skipped values.
const maxDepth = 32

func errorAt(what string, at int) error {
	return fmt.Errorf("%w: JSON: %s at byte %d", status.ErrInvalid, what, at)
}

// Fail makes the Scanner fail at the current place.
func (s *Scanner) Fail(what string) {
	if s.err == nil {
		s.err = errorAt(what, s.at)
		s.at = len(s.text)
	}
}

// Check makes the Scanner fail with err, if it is not nil.
func (s *Scanner) Check(err error) {
	if s.err == nil && err != nil {
		s.err, s.at = err, len(s.text)
	}
}

// peek is the next byte that is not white space, or 0 at the end.
func (s *cursor) peek() byte {
	for s.at < len(s.text) {
		switch c := s.text[s.at]; c {
		case ' ', '\t', '\n', '\r':
			s.at++
		default:
			return c
		}
	}
	return 0
}

// skipByte steps over c if it is the next byte.
func (s *Scanner) skipByte(c byte) bool {
	if s.peek() == c && s.at < len(s.text) {
		s.at++
		return true
	}
	return false
}

func (s *Scanner) expect(c byte) {
	if !s.skipByte(c) {
		s.Fail("expected " + strconv.QuoteRune(rune(c)))
	}
}

// Each walks over the members of an object: the callback gets the key and reads the value.
// Each skips members that are null, since many programs write absent members that way.
func (s *Scanner) Each(member func(key []byte)) {
	s.expect('{')
	if s.skipByte('}') {
		return
	}
	for s.err == nil {
		key := s.Text()
		s.expect(':')
		if s.err != nil {
			return
		}
		if !s.skipNull() {
			member(key)
		}
		if s.skipByte('}') {
			return
		}
		s.expect(',')
	}
}

func (s *Scanner) skipNull() bool {
	s.peek()
	if !bytes.HasPrefix(s.text[s.at:], []byte("null")) {
		return false
	}
	s.at += len("null")
	return true
}

// Items walks over an array.
func (s *Scanner) Items(item func()) {
	s.expect('[')
	if s.skipByte(']') {
		return
	}
	for s.err == nil {
		item()
		if s.skipByte(']') {
			return
		}
		s.expect(',')
	}
}

// Text reads a string. Without escapes the result is a part of the scanned text.
func (s *Scanner) Text() []byte {
	s.expect('"')
	from := s.at
	for s.at < len(s.text) {
		switch c := s.text[s.at]; {
		case c == '"':
			s.at++
			if p := s.text[from : s.at-1]; utf8.Valid(p) {
				return p
			}
			s.Fail("bad UTF-8 in a string")
			return nil
		case c == '\\':
			return s.escaped(from)
		case c < ' ':
			s.Fail("control character in a string")
			return nil
		}
		s.at++
	}
	s.Fail("unfinished string")
	return nil
}

var replaced = []byte("\ufffd")

func (s *Scanner) escaped(from int) []byte {
	for s.at < len(s.text) {
		switch c := s.text[s.at]; {
		case c == '"':
			s.at++
			var text string
			raw := s.text[from-1 : s.at]
			if err := json.Unmarshal(raw, &text); err != nil {
				s.Fail("bad string")
				return nil
			}
			// Unmarshal replaces what is not UTF-8.
			given := bytes.Count(raw, replaced) + bytes.Count(bytes.ToLower(raw), []byte(`\ufffd`))
			if !utf8.Valid(raw) || strings.Count(text, string(replaced)) > given {
				s.Fail("bad UTF-8 in a string")
				return nil
			}
			return []byte(text)
		case c == '\\':
			s.at++
		}
		s.at++
	}
	s.Fail("unfinished string")
	return nil
}

// word reads a number, true, false or null; wanted is for the error.
func (s *Scanner) word(wanted string) []byte {
	s.peek()
	from := s.at
	for s.at < len(s.text) {
		switch c := s.text[s.at]; {
		case c >= '0' && c <= '9', c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z', c == '-', c == '+', c == '.':
			s.at++
			continue
		}
		break
	}
	if s.at == from {
		s.Fail("expected " + wanted)
	}
	return s.text[from:s.at]
}

// Skip steps over a value, checks it, and returns its text.
func (s *Scanner) Skip() []byte {
	s.peek()
	from := s.at
	s.skipValue(0)
	if s.err != nil {
		return nil
	}
	return s.text[from:s.at]
}

func (s *Scanner) skipValue(depth int) {
	if depth > maxDepth {
		s.Fail("nested too deeply")
		return
	}
	switch s.peek() {
	case '{':
		s.Each(func([]byte) { s.skipValue(depth + 1) })
	case '[':
		s.Items(func() { s.skipValue(depth + 1) })
	case '"':
		s.Text()
	default:
		switch w := s.word("a value"); {
		case s.err != nil:
		case IsNumber(w):
		case string(w) == "true", string(w) == "false", string(w) == "null":
		case string(w) == "NaN", string(w) == "Infinity", string(w) == "-Infinity": // common extensions
		default:
			s.Fail("bad value " + strconv.Quote(string(w[:min(len(w), 32)])))
		}
	}
}

// Integer reads a whole number.
func (s *Scanner) Integer() int64 {
	w := s.word("a whole number")
	if s.err != nil {
		return 0
	}
	n, err := parseInt(w)
	if err != nil || !IsNumber(w) { // no leading zeros, no plus
		s.Fail("expected a whole number of 64 bits")
	}
	return n
}

// Boolean reads true or false.
func (s *Scanner) Boolean() bool {
	switch w := s.word("true or false"); {
	case bytes.Equal(w, []byte("true")):
		return true
	case bytes.Equal(w, []byte("false")):
		return false
	}
	s.Fail("expected true or false")
	return false
}

// End fails if more text follows.
func (s *Scanner) End() {
	if s.err == nil && (s.peek() != 0 || s.at < len(s.text)) {
		s.Fail("something follows the end")
	}
}
