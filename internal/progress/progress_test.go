// SPDX-License-Identifier: Apache-2.0

package progress

import (
	"strings"
	"testing"
)

func TestALineIsCutToTheTerminal(t *testing.T) {
	for _, c := range []struct {
		text  string
		width int
		want  string
	}{
		{"12s  measuring 2 × 8", 80, "12s  measuring 2 × 8"},
		{"12s  measuring 2 × 8", 0, "12s  measuring 2 × 8"}, // not known
		{"12s  measuring 2 × 8", 19, "12s  measuring 2 …"},
		{"2 × 8", 5, "2 ×…"},
		{"2 × 8", 1, "…"},
	} {
		if got := fit(c.text, c.width); got != c.want || c.width > 1 && len([]rune(got)) >= c.width {
			t.Errorf("%q in %d columns: %q, want %q", c.text, c.width, got, c.want)
		}
	}
}

func TestTheTailKeepsTheEnd(t *testing.T) {
	var l Tail
	for range tailBytes / 5 { // twice its limit
		_, _ = l.Write([]byte("some line\n"))
	}
	_, _ = l.Write([]byte("the last one\n"))
	if s := l.String(); len(s) > tailBytes || !strings.HasSuffix(s, "the last one") {
		t.Errorf("%d bytes, ending in %q", len(s), s[max(0, len(s)-20):])
	}
}
