// SPDX-License-Identifier: Apache-2.0

package main

import "fmt"

// didYouMean names the command that a mistyped one is nearest to, if one is near.
func didYouMean(typed string) string {
	best, least := "", 3 // two letters wrong, swapped or missing
	for _, c := range commands() {
		if d := distance(typed, c.name); d < least && d < len(c.name)-1 {
			best, least = c.name, d
		}
	}
	if best == "" {
		return ""
	}
	return fmt.Sprintf(" (did you mean %s?)", best)
}

// distance is Levenshtein's: how many letters must be changed, added or left out.
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			here := diagonal
			if a[i] != b[j] {
				here = 1 + min(diagonal, row[j], row[j+1])
			}
			diagonal, row[j+1] = row[j+1], here
		}
	}
	return row[len(b)]
}
