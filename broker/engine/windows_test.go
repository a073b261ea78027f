// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"math/rand/v2"
	"slices"
	"testing"
)

// The list of gaps is compared with a plain list of slots, searched from the lowest.
func TestWindowsAreLeasedLowestFirstAndComeBack(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	const slots = 50
	w, used := newWindows(slots), make([]bool, slots)
	type window struct{ first, n int }
	var leased []window
	for range 20_000 {
		if len(leased) > 0 && rng.IntN(2) == 0 {
			i := rng.IntN(len(leased))
			x := leased[i]
			leased = slices.Delete(leased, i, i+1)
			w.returnSlots(uint32(x.first), x.n)
			for j := range x.n {
				used[x.first+j] = false
			}
			continue
		}
		n := 1 + rng.IntN(12)
		want, run := -1, 0
		for i := range used {
			if run++; used[i] {
				run = 0
			}
			if run == n {
				want = i - n + 1
				break
			}
		}
		first, ok := w.leaseSlots(n)
		if ok != (want >= 0) || ok && int(first) != want {
			t.Fatalf("%d slots of %v: %d, %v, not %d", n, used, first, ok, want)
		}
		if ok {
			leased = append(leased, window{want, n})
			for j := range n {
				used[want+j] = true
			}
		}
	}
	free := 0
	for _, u := range used {
		if !u {
			free++
		}
	}
	if w.free != free {
		t.Errorf("%d free, not %d", w.free, free)
	}
}
