// SPDX-License-Identifier: Apache-2.0

package npy

import (
	"fmt"
	"strconv"
	"strings"
)

// The header is a Python dict literal. This reads the subset that NumPy writes:
//
//	{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }
//
// in any order of keys, with either quote, blanks anywhere.

type headerParser struct{ rest string }

func parseHeader(text string) (Array, error) {
	p := &headerParser{rest: text}
	var a Array
	seen := map[string]bool{}
	if !p.eat("{") {
		return a, p.fail("no dict")
	}
	for !p.eat("}") {
		key, err := p.str()
		if err != nil {
			return a, err
		}
		if seen[key] {
			return a, p.fail("key %q twice", key)
		}
		seen[key] = true
		if !p.eat(":") {
			return a, p.fail("no colon after %q", key)
		}
		switch key {
		case "descr":
			a.DType, err = p.dtype()
		case "fortran_order":
			err = p.cOrder()
		case "shape":
			a.Shape, err = p.shape()
		default:
			err = p.fail("unknown key %q", key)
		}
		if err != nil {
			return a, err
		}
		if !p.eat(",") && !strings.HasPrefix(p.skip(), "}") {
			return a, p.fail("neither comma nor end after %q", key)
		}
	}
	if p.skip() != "" {
		return a, p.fail("text after the dict")
	}
	for _, key := range []string{"descr", "fortran_order", "shape"} {
		if !seen[key] {
			return a, p.fail("no %q", key)
		}
	}
	return a, nil
}

func (p *headerParser) fail(format string, args ...any) error {
	return fmt.Errorf("%w: header: %s", ErrFormat, fmt.Sprintf(format, args...))
}

func (p *headerParser) skip() string {
	p.rest = strings.TrimLeft(p.rest, " \t\r\n")
	return p.rest
}

func (p *headerParser) eat(token string) bool {
	if !strings.HasPrefix(p.skip(), token) {
		return false
	}
	p.rest = p.rest[len(token):]
	return true
}

// str reads a quoted string. None that we accept has an escape in it.
func (p *headerParser) str() (string, error) {
	for _, quote := range []string{"'", `"`} {
		if !p.eat(quote) {
			continue
		}
		s, rest, ok := strings.Cut(p.rest, quote)
		if !ok {
			return "", p.fail("open string")
		}
		if strings.ContainsAny(s, "\\\n") {
			return "", p.fail("escape in %q", s)
		}
		p.rest = rest
		return s, nil
	}
	return "", p.fail("a string is missing")
}

func (p *headerParser) dtype() (string, error) {
	if strings.HasPrefix(p.skip(), "[") {
		return "", fmt.Errorf("%w: structured dtype", ErrUnsupported)
	}
	descr, err := p.str()
	if err != nil {
		return "", err
	}
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

func (p *headerParser) cOrder() error {
	switch {
	case p.eat("False"):
		return nil
	case p.eat("True"):
		return fmt.Errorf("%w: fortran_order; convert with numpy.ascontiguousarray", ErrUnsupported)
	}
	return p.fail("fortran_order is neither True nor False")
}

// shape reads a tuple: (), (3,), (3, 4). One size needs its comma, as in Python.
func (p *headerParser) shape() ([]int, error) {
	if !p.eat("(") {
		return nil, p.fail("shape is no tuple")
	}
	shape, comma := []int{}, true
	for !p.eat(")") {
		if !comma {
			return nil, p.fail("no comma in shape")
		}
		if len(shape) == MaxRank {
			return nil, p.fail("more than %d dimensions", MaxRank)
		}
		digits := p.skip()
		n := 0
		for n < len(digits) && '0' <= digits[n] && digits[n] <= '9' {
			n++
		}
		d, err := strconv.Atoi(digits[:n])
		if err != nil {
			return nil, p.fail("bad size in shape")
		}
		p.rest = digits[n:]
		p.eat("L") // Python 2 wrote long integers so
		shape = append(shape, d)
		comma = p.eat(",")
	}
	if len(shape) == 1 && !comma {
		return nil, p.fail("shape is no tuple")
	}
	return shape, nil
}
