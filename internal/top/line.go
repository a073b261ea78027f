// SPDX-License-Identifier: Apache-2.0

package top

import (
	"strings"
	"unicode"

	"golang.org/x/text/width"

	"github.com/ringbatch/ringbatch/internal/printable"
)

// style is how a text looks, as the parameters of an SGR sequence.
type style string

const (
	plain   style = ""
	bold    style = "1"
	dim     style = "2"
	chosen  style = "7" // reverse
	good    style = "32"
	bad     style = "31"
	badBold style = "1;31"
)

// line is one line of the screen that is being written, at most so wide.
type line struct {
	text       strings.Builder
	wide, most int
}

func newLine(most int) *line { return &line{most: most} }

// add writes a text as far as it fits. Whatever it holds, it becomes printable
// characters of this line.
func (l *line) add(s style, text string) *line {
	const mostBytes = 4096
	text = cut(printable.Text(text, mostBytes), l.most-l.wide)
	if text == "" {
		return l
	}
	l.wide += columns(text)
	if s != plain {
		l.text.WriteString("\x1b[" + string(s) + "m" + text + "\x1b[0m")
	} else {
		l.text.WriteString(text)
	}
	return l
}

// fill adds blanks up to a column.
func (l *line) fill(s style, column int) *line {
	return l.add(s, strings.Repeat(" ", max(0, min(column, l.most)-l.wide)))
}

func (l *line) String() string { return l.text.String() }

// columns is how wide a printable text is.
func columns(s string) (n int) {
	for _, r := range s {
		n += runeColumns(r)
	}
	return n
}

func runeColumns(r rune) int {
	if r < 0x300 {
		return 1
	}
	if unicode.In(r, unicode.Mn, unicode.Me) {
		return 0 // on top of the one before
	}
	switch width.LookupRune(r).Kind() {
	case width.EastAsianWide, width.EastAsianFullwidth:
		return 2
	}
	return 1
}

// cut is s, or as much of it as has room in so many columns with a "…".
func cut(s string, most int) string {
	if most <= 0 {
		return ""
	}
	if columns(s) <= most {
		return s
	}
	wide, end := 0, 0
	for i, r := range s {
		if wide+runeColumns(r) > most-1 {
			end = i
			break
		}
		wide += runeColumns(r)
	}
	return s[:end] + "…"
}

// pad puts a text into a column of the table, at its left or right side.
func pad(s string, to int, left bool) string {
	s = cut(printable.Text(s, 4096), to)
	blanks := strings.Repeat(" ", max(0, to-columns(s)))
	if left {
		return s + blanks
	}
	return blanks + s
}
