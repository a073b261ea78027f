// SPDX-License-Identifier: Apache-2.0

package batcher

import "math"

// doubt is about whether the machine still has the pace that it had: batches were far
// off lately, all on the same side. Until that is decided, a batch is held against what
// was known before the first of them. What has been learned since then fits to the
// new pace, and would tell that nothing has changed.
type doubt struct {
	odd   int        // batches in a row that were far off: >0 slower, <0 faster; 0: no doubt
	off   [3]float64 // by how much, as logarithms
	since uint32     // the first of them
	from  Time       // when that began
	end   Time       // when the last of them ended
	level float64    // costs.level before it
}

// expectation is what a batch should take, by what was known before the present doubt,
// and how much slower and quicker it may well be, as logarithms; 0 if nothing tells.
type expectation struct {
	time, slow, quick float64
	foreseen          bool // from other sizes: its own was not seen before
}

func (c *costs) expectation(p *costPoint, others, rows int) expectation {
	if p.count == 0 || c.isDoubted(p.first) {
		return c.foreseen(others, rows)
	}
	if c.isDoubted(p.last) {
		return expectation{p.was, farOff, farOff, false}
	}
	return expectation{p.time, farOff, farOff, false}
}

// foreseen is what a size that was not seen before should take, by its own curve or by
// that of which most is known.
func (c *costs) foreseen(others, rows int) expectation {
	own := c.before(others)
	if own.foresees(rows) {
		return expectation{own.at(rows), veryFarOff, veryFarOff, true}
	}
	best := c.best()
	form := c.before(best)
	if !form.foresees(rows) {
		return expectation{foreseen: true}
	}
	if factor := own.against(form); factor > 0 {
		return expectation{factor * form.at(rows), 2 * veryFarOff, 2 * veryFarOff, true}
	}
	// Workers that share a GPU slow each other down, up to taking turns.
	turns := math.Log(max(1, float64(best+1)/float64(others+1)))
	return expectation{form.at(rows), 2 * veryFarOff, veryFarOff + turns, true}
}

// isNews notes by how much a batch was off from what was expected of it, and says
// whether it was the third in a row. Each of them must have begun after the one before
// had ended: a machine that stands still for a moment makes a batch of every worker
// slow, and is the same again afterwards. One that is right ends the doubt, unless it
// began before.
func (c *costs) isNews(e expectation, p *costPoint, t float64, first bool, from, ended Time) bool {
	if e.time == 0 {
		return false
	}
	d := &c.doubt
	off, side := math.Log(t/e.time), c.side(e, p, t, first)
	if side == 0 && (e.foreseen || c.beganBefore(from)) {
		return false
	}
	if side*d.odd <= 0 {
		d.odd, d.since, d.from, d.level = 0, c.batches, from, c.level
	}
	if side == 0 || d.odd != 0 && from < d.end {
		return false
	}
	d.odd += side
	d.end = ended
	n := d.odd * side
	d.off[n-1] = off
	return n == len(d.off)
}

// side is where a batch was far off: >0 slower, <0 faster. What is only foreseen may be
// wrong because another size was cold. So it must be off by more; quick ones count once
// for a size, and when some size is known well; and slow ones only if they cannot be cold.
func (c *costs) side(e expectation, p *costPoint, t float64, first bool) int {
	off := math.Log(t / e.time)
	switch {
	case off > e.slow && !(e.foreseen && first):
		return 1
	case off < -e.quick && !(e.foreseen && (p.count > 1 || !c.sure)):
		return -1
	}
	return 0
}

// isDoubted says whether a batch, by its number, is one of the present doubt.
func (c *costs) isDoubted(batch uint32) bool {
	return c.doubt.odd != 0 && c.batches-batch <= c.batches-c.doubt.since // by their age: numbers begin anew after 2^32
}

// beganBefore says whether a batch began before the present doubt: it tells of the pace of then.
func (c *costs) beganBefore(from Time) bool { return c.doubt.odd != 0 && from < c.doubt.from }

// before is a curve as it was before the present doubt.
func (c *costs) before(others int) *curve {
	v := &c.curves[others]
	if !c.isDoubted(v.last) {
		return v
	}
	was := *v
	for i := v.told.next(0); i >= 0; i = v.told.next(i + 1) {
		if p := &was.points[i]; c.isDoubted(p.first) || c.isDoubted(p.last) && p.was == 0 {
			was.told.remove(i)
		} else if c.isDoubted(p.last) {
			p.time = p.was
		}
	}
	return &was
}

// move ends a doubt: the machine has another pace. All that was seen lately goes there
// at once, but for what is there already; the others follow.
func (c *costs) move() {
	off := median(c.doubt.off)
	c.moves++
	if math.Abs(off) > veryFarOff {
		c.leaps++
	}
	factor := math.Exp(off)
	c.level = c.doubt.level + off
	for j := range c.curves {
		v := &c.curves[j]
		for i := v.seen.next(0); i >= 0; i = v.seen.next(i + 1) {
			p := &v.points[i]
			switch {
			case !c.isDoubted(p.last):
				p.time *= factor
			case off > 0:
				p.time = max(p.time, min(p.saw, p.was*factor))
			default:
				p.time = min(p.time, max(p.saw, p.was*factor))
			}
			// What a size takes in the long run, if it was first seen meanwhile, was learned
			// meanwhile, too. That of others stays: a rare size would go where its one batch
			// since then happened to be, a little further each time.
			if c.isDoubted(p.first) && p.count <= longRun {
				p.base = math.Log(p.time) - c.level
			}
			c.bound(p, j)
		}
	}
	c.doubt.odd = 0
	c.refresh()
}

func median(x [3]float64) float64 {
	return max(min(x[0], x[1]), min(max(x[0], x[1]), x[2]))
}
