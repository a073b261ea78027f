// SPDX-License-Identifier: Apache-2.0

package simulate

import "testing"

func TestTheRandomGridIsThatOfItsSeed(t *testing.T) {
	draw := func(seed uint64) []gridCell {
		cells, err := randomCells(1000, seed)
		if err != nil {
			t.Fatal(err)
		}
		return cells
	}
	one, again, other := draw(1), draw(1), draw(2)
	same := 0
	for i := range one {
		if err := one[i].cfg.validate(); err != nil {
			t.Errorf("%s: %v", one[i].name, err)
		}
		if one[i].name != again[i].name || one[i].cfg.Seed != again[i].cfg.Seed {
			t.Errorf("%s and %s with the same seed", one[i].name, again[i].name)
		}
		if one[i].name == other[i].name {
			same++
		}
	}
	if len(one) != randomGridCells || same > 0 {
		t.Errorf("%d cells, %d of them the same with another seed", len(one), same)
	}
}
