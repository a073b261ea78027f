// SPDX-License-Identifier: Apache-2.0

package auto

import "math"

// costs is the table of what batches took: by their rows, and by how many other
// workers were busy when they began.
//
// Each batch moves its cell a little. Three batches in a row that were all far too
// slow, or all far too quick, mean that the machine has changed: then the table is
// forgotten, but for those three.
type costs struct {
	curves  [maxOthers + 1]curve
	batches uint32
	changes int // how often the machine has changed

	odd [3]sample // batches in a row that were far off
	n   int       // how many: >0 slow, <0 quick
}

// sample is one batch.
type sample struct {
	rows, others int
	from, to     Time
}

func (x *sample) took() float64 { return float64(x.to - x.from) }

// curve is the cost by size class, beside one number of busy workers.
type curve struct {
	cells [sizeClasses]cell
	count uint32
}

// cell is the cost of one size class.
type cell struct {
	time  float64 // nanoseconds; 0: not seen
	count uint32  // batches seen
}

// observe learns from one batch. isFirst says that its worker had not run that size
// before: the batch may be slow because the worker was cold, and then it does not count.
func (c *costs) observe(x sample, isFirst bool) {
	if x.to <= x.from || x.rows < 1 {
		return
	}
	x.others = min(x.others, maxOthers)
	expected := c.expected(x.rows, x.others)
	if isFirst && expected > 0 && x.took() > farOff*c.most(x.rows, x.others) {
		return
	}
	c.batches++
	side := 0
	switch {
	case expected == 0:
	case x.took() > farOff*farOff*expected:
		side = 1
	case x.took() < expected/farOff/farOff:
		side = -1
	}
	if side == 0 || side*c.n < 0 {
		c.learnOdd() // they were no change
	}
	if side == 0 {
		c.learn(x)
	} else {
		c.setAside(x, side)
	}
}

// setAside keeps a batch that was far off until others tell whether the machine has
// changed. Each must begin after the last has ended: a standstill of the machine makes
// one batch of every worker slow.
func (c *costs) setAside(x sample, side int) {
	if c.n != 0 && x.from < c.odd[c.n*side-1].to {
		return
	}
	c.odd[c.n*side] = x
	if c.n += side; c.n*side == len(c.odd) {
		c.curves = [maxOthers + 1]curve{}
		c.changes++
		c.learnOdd()
	}
}

func (c *costs) learnOdd() {
	for i := range max(c.n, -c.n) {
		c.learn(c.odd[i])
	}
	c.n = 0
}

// learn moves a cell. The first batches may be slow by chance, but not quick.
func (c *costs) learn(b sample) {
	expected := c.expected(b.rows, b.others)
	v := &c.curves[b.others]
	v.count++
	x, took := &v.cells[classOf(b.rows)], b.took()
	x.count++
	switch {
	case x.count == 1 && expected > 0:
		x.time = min(took, farOff*farOff*expected)
	case x.count == 1:
		x.time = took
	case x.count <= young:
		x.time = min(took, x.time*farOff)
	default:
		took = max(x.time/farOff, min(took, x.time*farOff))
		x.time += (took - x.time) * max(0.1, 1/float64(x.count))
	}
}

// expected is what a batch should take; 0 if nothing is known.
func (c *costs) expected(rows, others int) float64 {
	if t := c.curves[min(others, maxOthers)].at(rows); t > 0 {
		return t
	}
	return c.curves[c.best()].at(rows)
}

// most is what a batch of a new size should take at most: as long for each row as the
// next smaller size that was seen.
func (c *costs) most(rows, others int) float64 {
	v := &c.curves[min(others, maxOthers)]
	if v.count == 0 {
		v = &c.curves[c.best()]
	}
	if low := v.seen(classOf(rows), -1); low >= 0 {
		return v.cells[low].time * max(1, float64(rows)/float64(sizeOf(low)))
	}
	return v.at(rows)
}

// best is the number of busy workers of which most is known.
func (c *costs) best() (best int) {
	for j := range c.curves {
		if c.curves[j].count > c.curves[best].count {
			best = j
		}
	}
	return best
}

// seen is the nearest class from i on that was seen, upwards or downwards; -1 if none.
func (v *curve) seen(i, step int) int {
	for ; i >= 0 && i < sizeClasses; i += step {
		if v.cells[i].count > 0 {
			return i
		}
	}
	return -1
}

// at is the time of a size: its own, or on a straight line through the two nearest
// sizes. While only one size is known, larger ones are assumed to cost little more: then
// they are tried, and known.
func (v *curve) at(rows int) float64 {
	if v.count == 0 {
		return 0
	}
	class := classOf(rows)
	low, high := v.seen(class, -1), v.seen(class, 1)
	switch {
	case low >= 0 && low == high:
		return v.cells[low].time
	case low < 0 && high < 0:
		return 0
	case low < 0:
		low, high = high, v.seen(high+1, 1)
	case high < 0:
		if below := v.seen(low-1, -1); below >= 0 {
			low, high = below, low
		}
	}
	a, size := v.cells[low].time, float64(sizeOf(low))
	more := float64(rows) - size
	if high < 0 {
		return a * (1 + 0.1*max(0, more)/size)
	}
	b := v.cells[high].time
	slope := (b - a) / (float64(sizeOf(high)) - size)
	if rows < sizeOf(low) || rows > sizeOf(high) {
		slope = max(0, slope)
	}
	return max(a+slope*more, min(a, b)/10)
}

// table is the cost of every size beside every number of busy workers.
type table struct {
	times [maxOthers + 1][sizeClasses]Time
	known bool
}

// of is what a batch takes.
func (t *table) of(rows, others int) Time {
	return t.times[max(0, min(others, maxOthers))][classOf(rows)]
}

// fill completes the table for batches of up to rows rows beside up to others busy
// workers. Sizes that were not seen beside as many follow the best-known curve,
// scaled. Beside others a batch takes no longer than if all took turns.
func (t *table) fill(c *costs, rows, others int) {
	form := &c.curves[c.best()]
	if t.known = form.count > 0; !t.known {
		return
	}
	factor := 0.0
	for j := 0; j <= min(others, maxOthers); j++ {
		v := &c.curves[j]
		if own := v.slowdown(form); own > 0 {
			factor = own
		} else if factor == 0 {
			factor = c.nextSlowdown(j, form)
		}
		for i := 0; i <= classOf(rows); i++ {
			time := factor * form.at(sizeOf(i))
			if x := &v.cells[i]; x.count > 0 {
				own := float64(min(x.count, 16))
				time = (own*x.time + 2*time) / (own + 2)
			} else if j > 0 {
				time = min(time, float64(j+1)*float64(t.times[0][i]))
			}
			t.times[j][i] = Time(max(1, time))
		}
	}
}

// slowdown is how many times as long as in form batches take, on average over the
// sizes seen; 0 if none was.
func (v *curve) slowdown(form *curve) float64 {
	sum, weight := 0.0, 0.0
	for i := v.seen(0, 1); i >= 0; i = v.seen(i+1, 1) {
		w := float64(min(v.cells[i].count, 16))
		sum += w * math.Log(v.cells[i].time/form.at(sizeOf(i)))
		weight += w
	}
	if weight == 0 {
		return 0
	}
	return math.Exp(sum / weight)
}

// nextSlowdown is the slowdown beside the next larger number of busy workers seen.
func (c *costs) nextSlowdown(j int, form *curve) float64 {
	for ; j <= maxOthers; j++ {
		if s := c.curves[j].slowdown(form); s > 0 {
			return s
		}
	}
	return 1
}
