// SPDX-License-Identifier: Apache-2.0

package engine

import "slices"

// windows leases ranges of consecutive slots, lowest first. Its cost grows with the gaps.
type windows struct {
	gaps []gap // ascending, none touching the next
	free int   // slots in the gaps
}

type gap struct{ first, n int }

func newWindows(slots int) windows { return windows{[]gap{{0, slots}}, slots} }

func (w *windows) leaseSlots(n int) (uint32, bool) {
	i := slices.IndexFunc(w.gaps, func(g gap) bool { return g.n >= n })
	if i < 0 {
		return 0, false
	}
	first := w.gaps[i].first
	if w.gaps[i].n == n {
		w.gaps = slices.Delete(w.gaps, i, i+1)
	} else {
		w.gaps[i] = gap{first + n, w.gaps[i].n - n}
	}
	w.free -= n
	return uint32(first), true
}

func (w *windows) returnSlots(first uint32, n int) {
	g := gap{int(first), n}
	i, _ := slices.BinarySearchFunc(w.gaps, g.first, func(x gap, first int) int { return x.first - first })
	w.free += n
	if i < len(w.gaps) && g.first+g.n == w.gaps[i].first { // the next one continues it
		g.n += w.gaps[i].n
		w.gaps = slices.Delete(w.gaps, i, i+1)
	}
	if i > 0 && w.gaps[i-1].first+w.gaps[i-1].n == g.first {
		w.gaps[i-1].n += g.n
		return
	}
	w.gaps = slices.Insert(w.gaps, i, g)
}
