// SPDX-License-Identifier: Apache-2.0

package batcher

import "math"

// The first batches of a size may take a hundred times as long as later ones: a GPU
// loads kernels and looks for the quickest. A policy that then avoids the size would
// never see it again, and believe for ever what it saw. So what is known of a size by
// a few batches only is held against what is known well: it should take no longer than
// a larger size, and each of its rows no longer than one of a smaller size. If it does,
// and by far, the size is taken for one that was not seen. To think too little of a
// size is no harm: it is tried then, and known well soon, also if it is in truth slower
// than larger ones.

// believe decides which points of the curves tell what a size takes.
func (c *costs) believe() {
	all := c.seen()
	for j := range c.curves {
		c.curves[j].told = c.curves[j].seen
	}
	// By others: the least that a size seen often took, of the sizes so far. Beside more
	// others it may take as long as if they took turns.
	var least [maxOthers + 1]float64
	pass := func(i int, allowed float64, unit func(*costPoint) float64) {
		for j := range c.curves {
			if p := &c.curves[j].points[i]; p.isKnownWell() {
				c.sure = true
				for k := range least {
					if t := p.time / unit(p) * max(1, float64(k+1)/float64(j+1)); least[k] == 0 || t < least[k] {
						least[k] = t
					}
				}
			}
		}
		for j := range c.curves {
			p := &c.curves[j].points[i]
			if p.count > 0 && !p.isKnownWell() && least[j] > 0 && p.time > least[j]*unit(p)*allowed {
				c.curves[j].told.remove(i)
			}
		}
	}
	for i := all.previous(sizeClasses - 1); i >= 0; i = all.previous(i - 1) {
		pass(i, math.Exp(farOff), func(*costPoint) float64 { return 1 })
	}
	least = [maxOthers + 1]float64{}
	for i := all.next(0); i >= 0; i = all.next(i + 1) {
		pass(i, math.Exp(veryFarOff), func(p *costPoint) float64 { return float64(p.rows) })
	}
}

// isKnownWell says whether a size was seen a few times when it was not cold.
func (p *costPoint) isKnownWell() bool { return p.warm >= youngPoint }
