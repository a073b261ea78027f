// SPDX-License-Identifier: Apache-2.0

// Package typo finds the name that a user may have meant.
package typo

import (
	"fmt"
	"slices"
	"strings"

	"github.com/ringbatch/ringbatch/status"
)

// DidYouMean is " (did you mean NAME?)" with the name nearest to typed, or "" if none is
// near.
func DidYouMean(typed string, names []string) string {
	nearest, least := "", 1+2*len(typed)/5 // of five letters two may be wrong
	for _, name := range names {
		if d := distance(typed, name); d < least {
			nearest, least = name, d
		}
	}
	if nearest == "" {
		return ""
	}
	return fmt.Sprintf(" (did you mean %s?)", nearest)
}

// UnknownKey is the error for a key that is not among the known ones.
func UnknownKey(name string, known []string) error {
	near, all := DidYouMean(name, known), strings.Join(slices.Sorted(slices.Values(known)), ", ")
	return fmt.Errorf("%w: unknown key %q%s; known are %s", status.ErrInvalid, name, near, all)
}

// distance is the number of letters to change, add or drop to turn a into b.
func distance(a, b string) int {
	if len(a) > 2*len(b)+8 {
		return len(a) // a peer may send a long name
	}
	line := make([]int, len(b)+1)
	for j := range line {
		line[j] = j
	}
	for i := range len(a) {
		corner := line[0]
		line[0] = i + 1
		for j := range len(b) {
			next := min(line[j]+1, line[j+1]+1, corner+1)
			if a[i] == b[j] {
				next = corner
			}
			corner, line[j+1] = line[j+1], next
		}
	}
	return line[len(b)]
}
