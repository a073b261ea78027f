// SPDX-License-Identifier: Apache-2.0

package shm

import "testing"

// The kernel refuses to populate from an address inside one of its pages.
func TestRangesAreWidenedToThePagesOfTheKernel(t *testing.T) {
	for _, c := range []struct {
		r                    Range
		page, size, from, to int64
	}{
		{Range{5000, 10}, 4096, 1 << 20, 4096, 8192},
		{Range{5000, 10}, 65536, 1 << 20, 0, 65536},
		{Range{65536 + 4096, 65536}, 65536, 1 << 20, 65536, 3 * 65536},
		{Range{65536 + 4096, 4096}, 65536, 65536 + 8192, 65536, 65536 + 8192}, // a segment ends inside a page
	} {
		if from, to := wholePages(c.r, c.page, c.size); from != c.from || to != c.to {
			t.Errorf("%+v in pages of %d: %d..%d", c.r, c.page, from, to)
		}
	}
}
