// SPDX-License-Identifier: Apache-2.0

package core

import "testing"

func TestAShareHasABatchWhereTheWindowHasTwo(t *testing.T) {
	for _, k := range [][3]int{{512, 32, 128}, {128, 32, 32}, {64, 32, 32}, {40, 32, 20}, {8, 8, 4}, {1, 8, 1}} {
		if got := shareOf(k[0], k[1]); got != k[2] {
			t.Errorf("a window of %d, batches of %d: %d, want %d", k[0], k[1], got, k[2])
		}
	}
}
