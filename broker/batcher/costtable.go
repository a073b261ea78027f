// SPDX-License-Identifier: Apache-2.0

package batcher

import "math"

// costTable is what batches are expected to take, for one replay: every size,
// also those that were not seen, by the number of other busy workers.
type costTable struct {
	times   [maxOthers + 1][sizeClasses]Time
	factors [maxOthers + 1]float64 // by other busy workers, against the curve that is known best
	known   bool
}

// fill makes the table for batches of up to rows rows, and up to so many others.
//
// The curve of which most is known gives the form. Each of the others is that
// times a factor, which is what the sizes that both have differ by on average,
// and goes its own way where it was seen more than once or twice. Numbers of
// others that were never seen lie on a straight line with the nearest two. A size
// that was not seen beside others takes as long as if they took turns, at most:
// where full batches side by side are slow, small ones may not be, and a wait
// that keeps them apart would never find out. What
// was not seen for long counts less and less, so that it is tried again: a
// batch beside others may be slow no more, and nobody would notice.
func (t *costTable) fill(c *costs, rows, others int) {
	c.believe()
	form := &c.curves[c.best()]
	if t.known = form.count > 0; !t.known {
		return
	}
	for j := range c.curves {
		t.factors[j] = math.Pow(c.curves[j].against(form), c.trust(j))
	}
	others = min(others, maxOthers)
	for j := 0; j <= others; j++ {
		v := &c.curves[j]
		factor := t.factors[j]
		if factor == 0 {
			factor = between(&t.factors, j)
		}
		for i := 0; i <= sizeClass(rows); i++ {
			time := factor * form.at(sizeOf(i))
			if p := &v.points[i]; v.told.has(i) {
				own := float64(min(p.count, 16)) * c.trust(j)
				time = (own*p.time + 2*time) / (own + 2)
			} else if j > 0 && c.curves[0].count > 0 {
				time = min(time, float64(j+1)*float64(t.times[0][i]))
			}
			t.times[j][i] = Time(max(1, time))
		}
	}
	t.catchUp(c, rows, others)
}

// turnsAtMost is how many times as long as if they took turns batches take side by side.
const turnsAtMost = 1.5

// catchUp mends what is known of batches beside few others by what was seen beside more of
// them since. Where the pace became another, and full batches run side by side from then
// on, one that runs alone might be taken for as quick as it was for ever.
func (t *costTable) catchUp(c *costs, rows, others int) {
	for few := range others {
		stale := c.batches - c.curves[few].last
		var times ratio
		for more := few + 1; more <= others; more++ {
			v := &c.curves[more]
			turns := turnsAtMost * float64(more+1) / float64(few+1)
			for i := v.told.next(0); i >= 0 && i <= sizeClass(rows); i = v.told.next(i + 1) {
				if p := &v.points[i]; stale > c.batches-p.last+youngPoint {
					times.add(p, turns*float64(t.times[few][i]))
				}
			}
		}
		slower := max(1, times.mean())
		for i := range sizeClass(rows) + 1 {
			t.times[few][i] = Time(slower * float64(t.times[few][i]))
		}
	}
}

// trust in what is known of a number of others: half for each trustedFor batches
// since it was seen.
func (c *costs) trust(others int) float64 {
	return math.Exp2(-float64(c.batches-c.curves[others].last) / trustedFor)
}

// hopes are the same for up to so many others, but what was not seen lately is
// taken to last no longer than what was seen tells: than a larger batch, or than
// a smaller one for each of its rows. A model that refuses what would take too
// long would never find out that it takes less. Until two sizes were seen beside as
// many others, nothing tells how much longer larger ones take, and they are hoped to take
// as long: by what one row takes, most requests would be refused until a larger
// batch was seen.
func (t *costTable) hopes(c *costs, rows, others int, out *[maxOthers + 1][sizeClasses]Time) {
	last, seen, slope := sizeClass(rows), c.seenNow(), c.slopeKnown()
	others = min(others, maxOthers)
	for k := range others + 1 {
		times := &out[k]
		*times = t.times[k]
		below, longest := -1, Time(0)
		for i := 0; i <= last; i++ {
			for j := range others + 1 {
				if c.curves[j].told.has(i) {
					longest = max(longest, t.times[j][i])
				}
			}
			if !slope && longest > 0 && !c.curves[k].told.has(i) {
				times[i] = longest
			} else if seen.has(i) {
				below = i
			} else if below >= 0 {
				times[i] = min(times[i], times[below]*Time(sizeOf(i))/Time(sizeOf(below)))
			}
		}
		above := Time(math.MaxInt64)
		for i := last; i >= 0; i-- {
			if seen.has(i) {
				above = times[i]
			} else {
				times[i] = min(times[i], above)
			}
		}
	}
}

// of is what a batch of so many rows takes while so many others are busy.
func (t *costTable) of(rows, others int) Time {
	return t.times[min(others, maxOthers)][sizeClass(rows)]
}

// against is how many times as long v takes as form; 0 if nothing tells.
func (v *curve) against(form *curve) float64 {
	var times ratio
	for i := v.told.next(0); i >= 0; i = v.told.next(i + 1) {
		p := &v.points[i]
		times.add(p, form.at(int(p.rows+0.5)))
	}
	return times.mean()
}

// ratio is how many times as long sizes take as something else, on average.
type ratio struct{ sum, weight float64 }

// add counts a size, and what it is held against. One that was seen often counts more.
func (r *ratio) add(p *costPoint, of float64) {
	w := float64(min(p.count, 16))
	r.sum += w * math.Log(p.time/of)
	r.weight += w
}

// mean is 0 if there is none.
func (r *ratio) mean() float64 {
	if r.weight == 0 {
		return 0
	}
	return math.Exp(r.sum / r.weight)
}

// between is the factor of a number of others that was never seen.
func between(factors *[maxOthers + 1]float64, others int) float64 {
	near, far := -1, -1
	for d := 1; d <= maxOthers; d++ {
		for _, j := range [2]int{others - d, others + d} {
			switch {
			case j < 0 || j > maxOthers || factors[j] == 0:
			case near < 0:
				near = j
			case far < 0:
				far = j
			}
		}
	}
	if far < 0 {
		return factors[near]
	}
	a, b := factors[near], factors[far]
	return max(a+(b-a)*float64(others-near)/float64(far-near), min(a, b)*0.5)
}
