// SPDX-License-Identifier: Apache-2.0

package npy

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
)

// The header is a Python dict literal. This reads the subset that NumPy writes:
//
//	{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }
//
// in any order of keys, with either quote, blanks anywhere. Python 2 wrote sizes as 3L.
const (
	pair  = `\s*['"](\w+)['"]\s*:\s*(['"][^'"\\\n]*['"]|\w+|\[.*\]|\(` + sizes + `\))\s*`
	sizes = `(?:\s*\d+L?\s*,)*(?:\s*\d+L?)?\s*`
)

var (
	wholeHeader = regexp.MustCompile(`^\s*\{` + pair + `(?:,` + pair + `)*,?\s*\}\s*$`)
	headerPair  = regexp.MustCompile(pair)
	shapeSize   = regexp.MustCompile(`\d+`)
)

func parseHeader(text string) (Array, error) {
	var a Array
	fail := func(format string, args ...any) (Array, error) {
		return a, fmt.Errorf("%w: header: %s", ErrFormat, fmt.Sprintf(format, args...))
	}
	if !wholeHeader.MatchString(text) {
		return fail("not a dict of 'descr', 'fortran_order' and 'shape'")
	}
	values := map[string]string{}
	for _, m := range headerPair.FindAllStringSubmatch(text, -1) {
		if _, twice := values[m[1]]; twice {
			return fail("key %q twice", m[1])
		}
		values[m[1]] = m[2]
	}
	descr, order, shape := values["descr"], values["fortran_order"], values["shape"]
	switch {
	case len(values) != 3 || descr == "" || order != "True" && order != "False" || !strings.HasPrefix(shape, "("):
		return fail("not a dict of 'descr', 'fortran_order' and 'shape'")
	case order == "True":
		return a, fmt.Errorf("%w: fortran_order; convert with numpy.ascontiguousarray", ErrUnsupported)
	case strings.HasPrefix(descr, "["):
		return a, fmt.Errorf("%w: structured dtype", ErrUnsupported)
	}
	a.Shape = []int{}
	for _, digits := range shapeSize.FindAllString(shape, -1) {
		n, err := strconv.Atoi(digits)
		if err != nil {
			return fail("bad size in shape")
		}
		a.Shape = append(a.Shape, n)
	}
	if len(a.Shape) == 1 && !strings.Contains(shape, ",") {
		return fail("shape is no tuple") // in Python, (1) is a number
	}
	var err error
	a.DType, err = parseDType(strings.Trim(descr, `'"`))
	return a, err
}

func parseDType(descr string) (string, error) {
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
