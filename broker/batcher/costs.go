// SPDX-License-Identifier: Apache-2.0

package batcher

import "math"

// costs is what batches of one shape were seen to take: a curve by the rows that
// the worker saw, for each number of other workers that were busy.
//
// Each batch moves the point of its size a little, and a single slow batch
// hardly: it is cut to size first. Three in a row that are far off on the same
// side are news about the machine: then all sizes go there at once (news.go).
//
// A size that was not seen lately takes what it takes in the long run, times how
// far the machine is from its long run now (level). It is never multiplied by one
// piece of news after the other: on a machine that is slow now and then, which
// begins at once and ends little by little, that would grow for ever.
type costs struct {
	curves  [maxOthers + 1]curve
	batches uint32
	sure    bool    // some size is known well
	level   float64 // how far batches are from the long run now, a logarithm
	shift   float64 // of the long run, of the sizes seen lately on average, so far
	fresh   int     // sizes seen lately
	doubt   doubt
	ceiling ceiling
	moves   uint32 // how often the pace became another
	leaps   uint32 // how often by far
}

// curve is the time by size.
type curve struct {
	points [sizeClasses]costPoint
	seen   sizeSet // points[i].count > 0
	told   sizeSet // those of them that are believed
	count  int
	last   uint32 // the batch that it was seen with last
}

// costPoint is what one size takes.
type costPoint struct {
	rows  float32 // average, of a class that has several sizes
	count uint32
	warm  uint32  // of them, those that were not the first of this size in their worker
	time  float64 // nanoseconds
	base  float64 // its logarithm in the long run
	shift float64 // costs.shift when it was seen last
	first uint32  // the batch that it was seen with first
	last  uint32  // the batch that it was seen with last
	was   float64 // what it was known, or foreseen, to take before the present doubt
	saw   float64 // what it took last
}

const (
	maxOthers   = 7
	farOff      = 0.26 // a logarithm: 1.3 times as long
	veryFarOff  = 0.7  // twice as long
	slowestGain = 0.1
	trustedFor  = 5000.0
	seenLately  = 256 // batches ago
	freshFor    = 32  // batches
	youngPoint  = 4   // batches
	longRun     = 64  // batches of a size
	levelGain   = 0.125
)

// known says whether any batch was seen.
func (c *costs) known() bool { return c.batches > 0 }

// observe learns from one batch, and when it began. The first of its size in its
// worker may be cold: if it is slow where others were not, it tells nothing.
func (c *costs) observe(rows, others int, from, took Time, first bool) {
	if took <= 0 || rows < 1 {
		return
	}
	t := float64(took)
	v := &c.curves[min(others, maxOthers)]
	class := sizeClass(rows)
	p := &v.points[class]
	if first && p.warm > 0 && t > p.time*math.Exp(veryFarOff) {
		return
	}
	if p.warm < youngPoint {
		defer c.believe()
	}
	c.batches++
	c.ceiling.observe(rows, t)
	fresh := p.count > 0 && c.batches-p.last <= freshFor
	if c.batches%freshFor == 0 {
		defer c.refresh()
	}
	e := c.expectation(p, min(others, maxOthers), rows)
	v.count++
	v.last = c.batches
	p.count++
	if !first {
		p.warm++
	}
	if !c.beganBefore(from) {
		p.was, p.saw, p.last = e.time, t, c.batches
	}
	p.rows += (float32(rows) - p.rows) / float32(min(p.count, 16))
	off := math.Log(t / p.time)
	young := p.count <= youngPoint || p.warm <= 1
	if p.count == 1 {
		p.time, p.first = t, c.batches
		if e.time > 0 { // one slow batch must not make a size look slow for ever: it might not be tried again
			p.time = min(t, e.time*math.Exp(e.slow))
		}
		p.base, p.shift = math.Log(p.time)-c.level, c.shift
		v.seen.add(class)
	} else if !young || v.told.has(class) && (c.sure || off > -farOff) { // or it may have been cold before, and is not now
		c.settle(p, t, fresh)
	} else {
		e.time, p.was = 0, 0
	}
	if c.isNews(e, p, t, first, from, from+took) {
		c.move()
		return
	}
	switch {
	case p.count == 1:
		return
	case !young:
		off = max(-farOff, min(off, farOff)) * max(1/float64(p.count), slowestGain)
	case off > 0:
		// The first few may be slow by chance, but not quick.
		off = min(off, veryFarOff) / float64(p.count)
	}
	p.time *= math.Exp(off)
	if young {
		p.base = math.Log(p.time) - c.level
	}
}

// settle learns what a size takes in the long run, and how far from it the
// machine is now.
func (c *costs) settle(p *costPoint, t float64, fresh bool) {
	off := max(-farOff, min(math.Log(t)-p.base-c.level, farOff))
	c.level += levelGain * off
	moved := off / float64(p.count) // while little is known of it
	if p.count > longRun {
		moved = off / longRun
		if fresh {
			c.shift += moved / float64(max(1, c.fresh))
		}
	}
	p.base += moved
	p.shift = c.shift
}

// refresh has the sizes that were not seen lately go with the others.
func (c *costs) refresh() {
	c.fresh = 0
	for j := range c.curves {
		v := &c.curves[j]
		for i := v.seen.next(0); i >= 0; i = v.seen.next(i + 1) {
			p := &v.points[i]
			if c.batches-p.last <= freshFor {
				if p.count > longRun {
					c.fresh++
				}
				continue
			}
			p.base += c.shift - p.shift
			p.shift = c.shift
			p.time = math.Exp(p.base + c.level)
			c.bound(p, j)
		}
	}
}

// slopeKnown says whether two sizes were seen, and believed, beside as many others.
func (c *costs) slopeKnown() bool {
	for j := range c.curves {
		if c.curves[j].told.len() > 1 {
			return true
		}
	}
	return false
}

// seen are the sizes that were, beside any number of others.
func (c *costs) seen() (all sizeSet) {
	for j := range c.curves {
		all.join(&c.curves[j].seen)
	}
	return all
}

// seenNow are those that were lately.
func (c *costs) seenNow() (now sizeSet) {
	for j := range c.curves {
		v := &c.curves[j]
		for i := v.seen.next(0); i >= 0; i = v.seen.next(i + 1) {
			if c.batches-v.points[i].last < seenLately {
				now.add(i)
			}
		}
	}
	return now
}

// at is the time of a size, between the nearest sizes that were seen. Beyond
// them the nearest two tell the slope; with only one, half of the time counts
// as fixed and half as growing with the rows, until more is known; for up to twice the rows
// only a tenth: where each request goes alone, a wait that brings two together must look
// good for once, or it is never known what they take. One size at least must have been
// seen.
func (v *curve) at(rows int) float64 {
	class := sizeClass(rows)
	if v.told.has(class) && class < exactSizes {
		return v.points[class].time
	}
	below, above := v.told.previous(class), v.told.next(class+1)
	var a, b *costPoint
	switch {
	case below < 0:
		a = &v.points[above]
		if next := v.told.next(above + 1); next >= 0 {
			b = &v.points[next]
		}
	case above < 0:
		a = &v.points[below]
		if next := v.told.previous(below - 1); next >= 0 {
			a, b = &v.points[next], a
		}
	default:
		a, b = &v.points[below], &v.points[above]
	}
	if b == nil {
		more := float64(rows)/float64(a.rows) - 1
		return a.time * (1 + 0.5*more - 0.4*max(0, min(more, 1)))
	}
	slope := (b.time - a.time) / float64(b.rows-a.rows)
	if below < 0 || above < 0 {
		slope = max(slope, 0)
	}
	return max(a.time+slope*(float64(rows)-float64(a.rows)), min(a.time, b.time)*0.1)
}

// expected is about what a batch takes; 0 if nothing is known.
func (c *costs) expected(rows, others int) float64 {
	v := &c.curves[min(others, maxOthers)]
	if v.told.empty() {
		v = &c.curves[c.best()]
	}
	if v.count == 0 {
		return 0
	}
	return v.at(rows)
}

// best is the number of others whose curve is known best.
func (c *costs) best() (best int) {
	for j := range c.curves {
		if now, v := &c.curves[best], &c.curves[j]; now.told.empty() || v.count > now.count && !v.told.empty() {
			best = j
		}
	}
	return best
}

// foresees says whether what is known tells of a size that was not seen yet:
// three sizes at least, and none of them far away.
func (v *curve) foresees(rows int) bool {
	if v.told.len() < 3 {
		return false
	}
	least, most := v.points[v.told.next(0)].rows, v.points[v.told.previous(sizeClasses-1)].rows
	return float32(rows) > least/2 && float32(rows) < 2*most
}
