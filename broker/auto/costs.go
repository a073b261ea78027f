// SPDX-License-Identifier: Apache-2.0

package auto

import (
	"math"
	"math/bits"

	"github.com/ringbatch/ringbatch/policy"
)

// costs are the times of batches, by their rows, and by how many other workers were busy when they
// began. Each batch moves its cell a little. A batch that is far off is set aside. If three in a row
// were far too slow, or far too quick, the machine has changed: everything but those three is forgotten.
type costs struct {
	curves  [maxOthers + 1]curve
	batches uint32
	aside   [3]sample // batches in a row that were far off
	odd     int       // how many: >0 slow, <0 quick
}

// curve is the cost by size class, beside one number of busy workers.
type curve struct {
	cells [sizeClasses]cell
	count uint32
}

type cell struct {
	time  float64 // nanoseconds
	count uint32  // batches seen
}

type sample struct {
	rows, others int
	from, to     Time
}

func (x *sample) took() float64 { return float64(x.to - x.from) }

// observe learns from one batch, and says whether the machine has changed. If the worker had not run
// that size before (isFirst), a slow batch does not count: the worker may have been cold.
func (c *costs) observe(x sample, isFirst bool) (changed bool) {
	if x.to <= x.from || x.rows < 1 {
		return false
	}
	x.others = min(x.others, maxOthers)
	expected := c.near(x.others).at(x.rows)
	if isFirst && expected > 0 && x.took() > farOff*c.most(x.rows, x.others) {
		return false
	}
	c.batches++
	side := 0
	switch {
	case c.curves[x.others].count == 0: // nothing to compare with
	case x.took() > farOff*farOff*expected:
		side = 1
	case x.took() < expected/farOff/farOff:
		side = -1
	}
	if side == 0 || side*c.odd < 0 {
		c.learnAside() // they were no change
	}
	if side == 0 {
		c.learn(x)
		return false
	}
	// A standstill of the machine makes one batch of every worker slow, all at once.
	if n := c.odd * side; n == 0 || x.from >= c.aside[n-1].to {
		c.aside[n] = x
		c.odd += side
	}
	if changed = c.odd*side == len(c.aside); changed {
		c.curves = [maxOthers + 1]curve{}
		c.learnAside()
	}
	return changed
}

func (c *costs) learnAside() {
	for i := range max(c.odd, -c.odd) {
		c.learn(c.aside[i])
	}
	c.odd = 0
}

// learn moves a cell. The first batches may be slow by chance, but not quick.
func (c *costs) learn(b sample) {
	v, took := &c.curves[b.others], b.took()
	v.count++
	x := &v.cells[classOf(b.rows)]
	x.count++
	switch {
	case x.count == 1:
		x.time = took
	case x.count <= young:
		x.time = min(took, x.time*farOff)
	default:
		took = max(x.time/farOff, min(took, x.time*farOff))
		x.time += (took - x.time) * max(0.1, 1/float64(x.count))
	}
}

// near is the curve beside as many busy workers, or the best known one.
func (c *costs) near(others int) *curve {
	if v := &c.curves[max(0, min(others, maxOthers))]; v.count > 0 {
		return v
	}
	return c.best()
}

// best is the curve of which most is known.
func (c *costs) best() *curve {
	best := &c.curves[0]
	for j := range c.curves {
		if c.curves[j].count > best.count {
			best = &c.curves[j]
		}
	}
	return best
}

// expected is the expected time of a batch, in nanoseconds; 0 if nothing is known. A batch that is
// larger than all seen counts as the largest of them: what it takes is not known.
func (c *costs) expected(rows, others int) float64 {
	v := c.near(others)
	return v.at(min(rows, sizeOf(max(0, v.seen(sizeClasses-1, -1)))))
}

// most is the longest plausible time of a batch of a new size: per row, that of the next smaller size.
func (c *costs) most(rows, others int) float64 {
	v := c.near(others)
	if low := v.seen(classOf(rows), -1); low >= 0 {
		return v.cells[low].time * max(1, float64(rows)/float64(sizeOf(low)))
	}
	return v.at(rows)
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

// at is the time of a size: seen, or on a line through the two nearest sizes. Sizes below all seen
// cost as much as the smallest. While one size is known, larger ones should cost little more.
func (v *curve) at(rows int) float64 {
	low, high := v.seen(classOf(rows), -1), v.seen(classOf(rows), 1)
	switch {
	case low < 0 && high < 0:
		return 0
	case low < 0 || low == high:
		return v.cells[high].time
	}
	a, more := v.cells[low].time, float64(rows-sizeOf(low))
	if high < 0 {
		below, slope := v.seen(low-1, -1), 0.1*a/float64(sizeOf(low))
		if below >= 0 {
			slope = max(0, a-v.cells[below].time) / float64(sizeOf(low)-sizeOf(below))
		}
		return a + slope*max(0, more)
	}
	return a + (v.cells[high].time-a)*more/float64(sizeOf(high)-sizeOf(low))
}

// table is the cost of every size beside every number of busy workers.
type table [maxOthers + 1][sizeClasses]Time

// fill completes the table for batches of up to rows rows beside up to others busy workers. Unseen
// sizes follow the best known curve, scaled, up to the time of workers that take turns. False:
// nothing is known.
func (t *table) fill(c *costs, rows, others int) bool {
	form := c.best()
	factors := c.slowdowns(form)
	for j := 0; form.count > 0 && j <= min(others, maxOthers); j++ {
		v := &c.curves[j]
		for i := 0; i <= classOf(rows); i++ {
			time := factors[j] * form.at(sizeOf(i))
			if v.cells[i].count > 0 {
				time = v.cells[i].time
			} else if j > 0 {
				time = min(time, float64(j+1)*float64(t[0][i]))
			}
			t[j][i] = Time(max(1, time))
		}
	}
	return form.count > 0
}

// slowdowns are the average times of batches beside 0, 1, 2 … busy workers, as multiples of form.
// Unseen numbers of workers lie on a line.
func (c *costs) slowdowns(form *curve) (out [maxOthers + 1]float64) {
	last := -1 // number seen
	for j := range c.curves {
		v, sum, n := &c.curves[j], 0.0, 0.0
		for i := v.seen(0, 1); i >= 0; i = v.seen(i+1, 1) {
			own := float64(min(v.cells[i].count, 16))
			sum, n = sum+own*math.Log(v.cells[i].time/form.at(sizeOf(i))), n+own
		}
		if out[j] = out[max(0, last)]; n == 0 {
			continue
		}
		out[j] = math.Exp(sum / n)
		for k := last + 1; k < j; k++ {
			out[k] = out[j]
			if last >= 0 {
				out[k] = out[last] + (out[j]-out[last])*float64(k-last)/float64(j-last)
			}
		}
		last = j
	}
	return out
}

// sizeOfBatch is the rows of a batch or, with MaxBatchCost, at least as many as cost the same if full
// batches have MaxBatchSize rows. So all that auto learns by rows it learns by cost.
func sizeOfBatch(s *policy.Settings, rows, cost int) int {
	if s.MaxBatchCost == 0 {
		return rows
	}
	return max(rows, int(min(policy.MaxRows, math.Ceil(float64(cost)*float64(s.MaxBatchSize)/float64(s.MaxBatchCost)))))
}

// sizeClasses is the number of classes of batch sizes: exactSizes, then eight for each power of two.
const sizeClasses = exactSizes + 8*16

func classOf(rows int) int {
	if rows <= exactSizes {
		return max(rows, 1) - 1
	}
	octave := bits.Len(uint(rows-1)) - 6 // 33..64: 0
	return min(exactSizes+8*octave+(rows-1-32<<octave)>>(octave+2), sizeClasses-1)
}

// sizeOf is the middle of a class.
func sizeOf(class int) int {
	if class < exactSizes {
		return class + 1
	}
	octave, eighth := (class-exactSizes)/8, (class-exactSizes)%8
	return 32<<octave + (eighth<<(octave+2) + 2<<octave)
}

// grown returns s long enough to index i; new entries are zero.
func grown[T any](s []T, i int) []T {
	if i >= len(s) {
		s = append(s, make([]T, max(len(s), i+1-len(s), 16))...)
	}
	return s
}
