// SPDX-License-Identifier: Apache-2.0

// Package printable makes texts of peers fit to be shown: in a terminal, a log
// or a page, where an escape sequence would do something and a line feed would
// forge a line.
package printable

import (
	"strings"
	"unicode"
	"unicode/utf8"
)

// Text is s with everything escaped that does not print on one line, and cut to
// most bytes, with "…" at the end if it was longer.
func Text(s string, most int) string {
	if len(s) <= most && clean(s) {
		return s
	}
	const cut = "…"
	var b strings.Builder
	fits := 0 // how much of it leaves room for the cut
	for len(s) > 0 {
		r, n := utf8.DecodeRuneInString(s)
		part := s[:n]
		if s = s[n:]; !shown(r, part) {
			part = escape(part)
		}
		if b.WriteString(part); b.Len() > most {
			return b.String()[:fits] + cut
		}
		if b.Len() <= most-len(cut) {
			fits = b.Len()
		}
	}
	return b.String()
}

// Lines is Text for a text of several lines. All but the first are indented, so
// that none passes for a line of the program that shows it.
func Lines(s string, most int) string {
	lines := strings.Split(s, "\n")
	for i, line := range lines {
		lines[i] = Text(line, most)
	}
	return strings.Join(lines, "\n  ")
}

func clean(s string) bool {
	for i, r := range s {
		if !shown(r, s[i:]) {
			return false
		}
	}
	return true
}

func shown(r rune, at string) bool {
	if r == utf8.RuneError && !strings.HasPrefix(at, string(utf8.RuneError)) {
		return false // no UTF-8
	}
	return unicode.IsPrint(r)
}

const hex = "0123456789abcdef"

// escape writes bytes as \x1b.
func escape(s string) string {
	var b strings.Builder
	for i := range len(s) {
		b.WriteString(`\x`)
		b.WriteByte(hex[s[i]>>4])
		b.WriteByte(hex[s[i]&15])
	}
	return b.String()
}
