// SPDX-License-Identifier: Apache-2.0

package batcher

// floor is the least that batches took lately, by their size: in the present
// period and the one before it. It is what no batch is expected to beat, where
// costs (costs.go) are what a batch is expected to take. By it a request is refused
// that finds a free worker: one that has little time may be lucky.
type floor struct {
	periods [2]floorTimes // the present one, the one before it
	from    Time          // when the present one began
}

type floorTimes struct {
	times   [sizeClasses]Time // 0: none was seen
	seen    [sizeClasses]int
	top     int // the largest class seen
	batches int
	longest Time
}

const (
	floorPeriod = remembered
	// floorBatches must have been seen before it counts: the first may be slow.
	floorBatches = 16
	// rareSize is seen less often than that: it may have been slow each time.
	rareSize = 4
)

func (f *floor) observe(rows int, took, finished Time) {
	f.turn(finished)
	if took <= 0 || rows < 1 {
		return
	}
	p, i := &f.periods[0], sizeClass(rows)
	if p.times[i] == 0 || took < p.times[i] {
		p.times[i] = took
	}
	p.seen[i]++
	p.top = max(p.top, i)
	p.batches++
	p.longest = max(p.longest, took)
}

// turn begins a new period when it is time, and forgets both when nothing was
// seen for that long.
func (f *floor) turn(now Time) {
	if now < f.from+floorPeriod {
		return
	}
	f.periods[1] = f.periods[0]
	if now >= f.from+2*floorPeriod {
		f.periods[1] = floorTimes{}
	}
	f.periods[0] = floorTimes{}
	f.from = now
}

// known says whether it counts: while nothing runs nothing is known after two periods.
func (f *floor) known(now Time) bool {
	return f.periods[0].batches+f.periods[1].batches >= floorBatches && now < f.from+2*floorPeriod
}

func (f *floor) longest() Time { return max(f.periods[0].longest, f.periods[1].longest) }

// exceeds says whether a batch of a request alone, if it began now, would take longer
// than its deadline allows, were it as quick as the quickest lately.
func (f *floor) exceeds(now Time, r *Request) bool {
	return r.Deadline-now < f.longest() && f.known(now) && r.Deadline-now < f.of(r.Rows)
}

// class is the quickest batch of a class, and how many were seen.
func (f *floor) class(i int) (Time, int) {
	now, before := &f.periods[0], &f.periods[1]
	t := now.times[i]
	if t == 0 || before.times[i] > 0 && before.times[i] < t {
		t = before.times[i]
	}
	return t, now.seen[i] + before.seen[i]
}

// of is what a batch of so many rows takes at least: as much as the quickest of the
// largest size seen that is not larger and not rare, or of any size above that one.
func (f *floor) of(rows int) Time {
	class := sizeClass(rows)
	least, rare := Time(0), false
	for i := max(f.periods[0].top, f.periods[1].top); i >= 0; i-- {
		t, seen := f.class(i)
		if t == 0 {
			continue
		}
		if least == 0 || t < least {
			least = t
		}
		if i <= class {
			if seen >= rareSize {
				return least
			}
			rare = true
		}
	}
	if !rare {
		return 0 // only larger ones were seen, or none
	}
	return least
}
