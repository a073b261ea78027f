// SPDX-License-Identifier: Apache-2.0

package batcher

// ceiling is what no batch takes longer than, by what was seen: as long as the longest
// of any size lately, or for each row as long as in the dearest. Where batches differ by
// chance, and by far, one piece of news follows the other, and what is told of sizes that
// are not seen themselves is a product of many errors. Without a bound it grows to
// minutes, and requests that have a minute are refused for it.
type ceiling struct {
	longest, perRow float64
}

const ceilingFades = 1 - 1.0/4096 // with each batch

func (x *ceiling) observe(rows int, took float64) {
	x.longest = max(took, x.longest*ceilingFades)
	x.perRow = max(took/float64(rows), x.perRow*ceilingFades)
}

// bound cuts what a size takes beside so many others, who may take turns with it. What it
// takes in the long run stays: the machine may only be slow for a while.
func (c *costs) bound(p *costPoint, others int) {
	p.time = min(p.time, max(c.ceiling.longest, c.ceiling.perRow*float64(p.rows))*float64(1+others))
}
