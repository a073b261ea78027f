// SPDX-License-Identifier: Apache-2.0

package progress

import "testing"

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
