// SPDX-License-Identifier: Apache-2.0

package typo

import (
	"strings"
	"testing"
)

func TestAMistypedNameIsToldTheOneItIsNear(t *testing.T) {
	names := []string{"broker", "gateway", "stats", "serve", "set", "torch"}
	for typed, want := range map[string]string{
		"brocker": "broker", "gatway": "gateway", "statsu": "stats", "serv": "serve", "sevre": "serve",
		"frobnicate": "", "fly": "", "nosuch": "", "x": "", "": "", strings.Repeat("x", 1<<20): "",
	} {
		if want != "" {
			want = " (did you mean " + want + "?)"
		}
		if got := DidYouMean(typed, names); got != want {
			t.Errorf("%.20q: %q, want %q", typed, got, want)
		}
	}
}
