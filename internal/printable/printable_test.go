// SPDX-License-Identifier: Apache-2.0

package printable_test

import (
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"github.com/ringbatch/ringbatch/internal/printable"
)

func TestWhatDoesNotPrintIsEscaped(t *testing.T) {
	for in, want := range map[string]string{
		"":                 "",
		"worker 1 (größe)": "worker 1 (größe)",
		"a\x1b[31mb":       `a\x1b[31mb`,
		"a\nb\r\t":         `a\x0ab\x0d\x09`,
		"\xff\xfe":         `\xff\xfe`,
		"right\u202eleft":  `right\xe2\x80\xaeleft`,
		"\u2028":           `\xe2\x80\xa8`,
		"\u009b31m":        `\xc2\x9b31m`,
	} {
		if got := printable.Text(in, 100); got != want {
			t.Errorf("%q is shown as %q, not %q", in, got, want)
		}
	}
}

func TestFurtherLinesAreIndented(t *testing.T) {
	const want = "it failed\n  ringbatch: all is well\\x1b[0m"
	if got := printable.Lines("it failed\nringbatch: all is well\x1b[0m", 100); got != want {
		t.Errorf("%q, not %q", got, want)
	}
}

func TestALongTextIsCutBetweenCharacters(t *testing.T) {
	for _, s := range []string{"x", "ö", "\x00", "\xff"} {
		s = strings.Repeat(s, 200)
		for most := 3; most < 150; most++ {
			if got := printable.Text(s, most); len(got) > most || !strings.HasSuffix(got, "…") || !utf8.ValidString(got) {
				t.Fatalf("%d bytes at most: %q", most, got)
			}
		}
	}
	if got := printable.Text(strings.Repeat("x", 128), 128); len(got) != 128 || strings.Contains(got, "…") {
		t.Errorf("%q", got)
	}
}

func FuzzText(f *testing.F) {
	f.Add("a\x1b[0m", 10)
	f.Fuzz(func(t *testing.T, s string, most int) {
		most = 3 + max(0, most)%300
		got := printable.Text(s, most)
		if len(got) > most || strings.ContainsFunc(got, func(r rune) bool { return !unicode.IsPrint(r) }) || !utf8.ValidString(got) {
			t.Errorf("%q, at most %d: %q", s, most, got)
		}
	})
}

func TestNumbersAreShortAndReadable(t *testing.T) {
	for x, want := range map[float64]string{0: "0", 0.001: "0.001", 0.25: "0.25", 3: "3", 12.5: "12.5", 99.99: "100", 12500: "12,500",
		-1234567: "-1,234,567"} {
		if got := printable.Number(x); got != want {
			t.Errorf("Number(%v) is %s, want %s", x, got, want)
		}
	}
}
