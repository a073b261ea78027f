// SPDX-License-Identifier: Apache-2.0

package main

import "testing"

func TestAMistypedCommandIsToldTheOneItIsNear(t *testing.T) {
	for typed, want := range map[string]string{
		"brocker": " (did you mean broker?)", "gatway": " (did you mean gateway?)", "statsu": " (did you mean stats?)",
		"serv": " (did you mean serve?)", "x": "", "frobnicate": "", "": "",
	} {
		if got := didYouMean(typed); got != want {
			t.Errorf("%q: %q, want %q", typed, got, want)
		}
	}
}
