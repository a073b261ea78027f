// SPDX-License-Identifier: Apache-2.0

package batcher

import "math"

// floor is the least that batches took lately, by their size: in the present
// period and the one before it. It is what no batch is expected to beat, where
// costs (costs.go) are what a batch is expected to take.
type floor struct {
	periods [2]floorTimes // the present one, the one before it
	from    Time          // when the present one began
	// What of found since the last batch, and 1: a request asks for each batch that runs.
	found [sizeClasses]Time
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
	// waitMargin is for what has to wait first: batches are hardly ever all as
	// quick as the quickest, and under overload, where those that are taken are just
	// within their deadlines, that would make all of them late.
	waitMargin = 1.03
)

func (f *floor) observe(rows int, took, finished Time) {
	f.turn(finished)
	if took <= 0 || rows < 1 {
		return
	}
	f.found = [sizeClasses]Time{}
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
	f.found = [sizeClasses]Time{}
}

func (f *floor) known(now Time) bool {
	return f.periods[0].batches+f.periods[1].batches >= floorBatches && now < f.from+2*floorPeriod
}

func (f *floor) longest() Time { return max(f.periods[0].longest, f.periods[1].longest) }

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
	if f.found[class] == 0 {
		f.found[class] = 1 + f.find(class)
	}
	return f.found[class] - 1
}

func (f *floor) find(class int) Time {
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

// hopeless says whether a request that arrives now cannot be answered by its
// deadline, if every batch from now on is as quick as the quickest of the last
// second or two, and less: what runs, what is queued before it, and its own. Then
// it is refused at once instead of after it has waited. While nothing runs, nothing is
// known after two seconds, and it is tried.
func (l *learner) hopeless(now Time, r *Request, queuedRows, expected int) bool {
	f := &l.floor
	if r.Deadline == Never || !f.known(now) {
		return false
	}
	if l.settings.LatencyGoal == 0 { // or late has
		l.follow(r)
	}
	if len(l.settings.Levels) > 1 {
		queuedRows = 0 // who goes before whom is another question
	}
	most := l.settings.MaxBatchSize
	before, own := l.packing.put(r.Rows, queuedRows, most)
	// Most have time enough, and are not looked at any closer.
	if r.Deadline-now >= Time(before+2)*f.longest() {
		return false
	}
	l.freeTimes(now, func(rows, _ int) Time { return f.of(rows) })
	if len(l.free) == 0 {
		return false // when a worker comes is not known
	}
	l.occupy(before, f.of(l.packing.fullRows(most)))
	start, rows := l.free[l.first()], r.Rows
	if start == now {
		return start+f.of(rows) > r.Deadline
	}
	if len(l.shapes) == 1 {
		rows = own + l.joining(now, start, expected) // they go out together
	} else if before > 0 {
		rows = most
	}
	return now+Time(waitMargin*float64(start+f.of(min(rows, most))-now)) > r.Deadline
}

// freeTimes is when each lane of the workers has done what it holds, if a batch
// takes what cost says: in l.free.
func (l *learner) freeTimes(now Time, cost func(rows, others int) Time) {
	l.free = l.free[:0]
	for i := range l.workers {
		x := &l.workers[i]
		if !x.here {
			continue
		}
		lanes := max(1, x.Lanes)
		for j := range lanes {
			at := Time(math.MinInt64)
			for k := j; k < len(x.batches); k += lanes { // what this lane has, one after the other
				p := &x.batches[k]
				start := p.dispatched
				if lanes == 1 {
					start = max(start, x.freeAt)
				}
				at = max(at, start) + cost(p.rows, p.others)
			}
			l.free = append(l.free, max(at, now))
		}
		if len(l.free) >= maxFree {
			break
		}
	}
}

// occupy gives so many batches of the same time to the lane that is free first.
func (l *learner) occupy(batches int, each Time) {
	if rounds := batches / len(l.free); rounds > 0 { // every worker does as many
		for i := range l.free {
			l.free[i] += Time(rounds) * each
		}
		batches %= len(l.free)
	}
	for range batches {
		l.free[l.first()] += each
	}
}
