// SPDX-License-Identifier: Apache-2.0

// Package printable writes numbers for people, and escapes texts from peers for terminals, logs and pages: an escape
// sequence could change the terminal, and a line feed could forge a line.
package printable

import (
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Text is s with unprintable characters escaped. If it is longer than most bytes, it is
// cut and ends with "…".
func Text(s string, most int) string {
	if len(s) <= most && clean(s) {
		return s
	}
	const cut = "…"
	var b strings.Builder
	fits := 0 // bytes that leave room for the cut
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

// Lines is Text for several lines. All but the first are indented, so that none looks
// like a line of the program that shows it.
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

// escape writes bytes like \x1b.
func escape(s string) (escaped string) {
	for i := range len(s) {
		escaped += fmt.Sprintf(`\x%02x`, s[i])
	}
	return escaped
}
