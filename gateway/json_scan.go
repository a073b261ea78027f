// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"bytes"
	"encoding/json"
	"strconv"
	"unicode/utf8"

	"github.com/ringbatch/ringbatch/internal/codec"
)

// scanner walks over a JSON text that is in memory, without making values of
// what nobody asks for. Errors are sticky: after one, everything is empty.
type scanner struct {
	text []byte
	at   int
	err  error
}

func (s *scanner) fail(what string) {
	if s.err == nil {
		s.err = badRequest("JSON: %s at byte %d", what, s.at)
		s.at = len(s.text)
	}
}

// check fails for what was read and may not be so.
func (s *scanner) check(err error) {
	if s.err == nil && err != nil {
		s.err, s.at = err, len(s.text)
	}
}

// peek is the next byte that is not white space; 0 at the end.
func (s *scanner) peek() byte {
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

// skipByte steps over c if it comes next.
func (s *scanner) skipByte(c byte) bool {
	if s.peek() == c && s.at < len(s.text) {
		s.at++
		return true
	}
	return false
}

func (s *scanner) expect(c byte) {
	if !s.skipByte(c) {
		s.fail("expected " + strconv.QuoteRune(rune(c)))
	}
}

// each walks over the members of an object. It gives the key, and the callback
// reads the value. One that is null is as good as not there: many write what
// they leave out so.
func (s *scanner) each(member func(key []byte)) {
	s.expect('{')
	if s.skipByte('}') {
		return
	}
	for s.err == nil {
		key := s.string()
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

func (s *scanner) skipNull() bool {
	s.peek()
	if !bytes.HasPrefix(s.text[s.at:], []byte("null")) {
		return false
	}
	s.at += len("null")
	return true
}

// items walks over an array.
func (s *scanner) items(item func()) {
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

// string reads a string; what it gives is a part of the text where the string
// has no escapes.
func (s *scanner) string() []byte {
	s.expect('"')
	from := s.at
	for s.at < len(s.text) {
		switch c := s.text[s.at]; {
		case c == '"':
			s.at++
			if p := s.text[from : s.at-1]; utf8.Valid(p) {
				return p
			}
			s.fail("bad UTF-8 in a string")
			return nil
		case c == '\\':
			return s.escaped(from)
		case c < ' ':
			s.fail("control character in a string")
			return nil
		}
		s.at++
	}
	s.fail("unfinished string")
	return nil
}

func (s *scanner) escaped(from int) []byte {
	for s.at < len(s.text) {
		switch c := s.text[s.at]; {
		case c == '"':
			s.at++
			var text string
			if err := json.Unmarshal(s.text[from-1:s.at], &text); err != nil {
				s.fail("bad string")
				return nil
			}
			return []byte(text)
		case c == '\\':
			s.at++
		}
		s.at++
	}
	s.fail("unfinished string")
	return nil
}

// word reads a number, true, false or null; wanted says which.
func (s *scanner) word(wanted string) []byte {
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
		s.fail("expected " + wanted)
	}
	return s.text[from:s.at]
}

// skip steps over a value, checks it, and gives its text.
func (s *scanner) skip() []byte {
	s.peek()
	from := s.at
	s.skipValue(0)
	if s.err != nil {
		return nil
	}
	return s.text[from:s.at]
}

func (s *scanner) skipValue(depth int) {
	if depth > maxJSONDepth {
		s.fail("nested too deeply")
		return
	}
	switch s.peek() {
	case '{':
		s.each(func([]byte) { s.skipValue(depth + 1) })
	case '[':
		s.items(func() { s.skipValue(depth + 1) })
	case '"':
		s.string()
	default:
		switch w := s.word("a value"); {
		case s.err != nil:
		case codec.IsNumber(w):
		case string(w) == "true", string(w) == "false", string(w) == "null":
		case string(w) == "NaN", string(w) == "Infinity", string(w) == "-Infinity": // many write them
		default:
			s.fail("bad value " + strconv.Quote(string(w[:min(len(w), 32)])))
		}
	}
}

// integer reads a whole number.
func (s *scanner) integer() int64 {
	w := s.word("a whole number")
	if s.err != nil {
		return 0
	}
	n, ok := parseInt(w)
	if !ok {
		s.fail("expected a whole number of 64 bits")
	}
	return n
}

// boolean reads true or false.
func (s *scanner) boolean() bool {
	switch w := s.word("true or false"); {
	case bytes.Equal(w, []byte("true")):
		return true
	case bytes.Equal(w, []byte("false")):
		return false
	}
	s.fail("expected true or false")
	return false
}

// end makes sure that nothing follows.
func (s *scanner) end() {
	if s.err == nil && (s.peek() != 0 || s.at < len(s.text)) {
		s.fail("something follows the end")
	}
}

// parseInt reads a whole number without an exponent, as everybody writes them.
func parseInt(w []byte) (int64, bool) {
	digits, negative := w, false
	if len(digits) > 0 && digits[0] == '-' {
		digits, negative = digits[1:], true
	}
	if len(digits) == 0 || len(digits) > 1 && digits[0] == '0' {
		return 0, false
	}
	if len(digits) > 18 {
		n, err := strconv.ParseInt(string(w), 10, 64)
		return n, err == nil
	}
	n := int64(0)
	for _, c := range digits {
		if c < '0' || c > '9' {
			return 0, false
		}
		n = n*10 + int64(c-'0')
	}
	if negative {
		n = -n
	}
	return n, true
}
