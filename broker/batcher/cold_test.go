// SPDX-License-Identifier: Apache-2.0

package batcher

import (
	"testing"
	"time"
)

// coldCosts is a model whose full batches are known well.
func coldCosts(others int) *costs {
	c := &costs{}
	for i := range 20 {
		c.observe(32, others, Time(i)*Time(10*time.Millisecond), Time(8*time.Millisecond), i == 0)
	}
	return c
}

func (c *costs) taken(rows, others int) time.Duration {
	var t costTable
	t.fill(c, 32, maxOthers)
	return time.Duration(t.of(rows, others))
}

// A policy that sends only full batches does not see the others again.
func TestASizeThatWasSeenColdIsNotTakenToLastLongerThanALargerOne(t *testing.T) {
	for _, times := range []int{1, 2, 3} {
		c := coldCosts(0)
		for range times {
			c.observe(24, 0, Time(time.Second), Time(300*time.Millisecond), true)
		}
		for _, rows := range []int{1, 16, 24, 31} {
			if took := c.taken(rows, 0); took > 8*time.Millisecond {
				t.Errorf("24 rows took 300 ms %d times: %d are taken to last %v, where 32 take 8 ms", times, rows, took)
			}
		}
	}
}

// Also if it came first of all, as the first batch of a model does.
func TestTheFirstBatchOfAllIsNotBelievedForLong(t *testing.T) {
	c := &costs{}
	c.observe(1, 0, 0, Time(800*time.Millisecond), true)
	c.observe(32, 0, Time(time.Second), Time(300*time.Millisecond), true)
	for i := range youngPoint {
		c.observe(32, 0, Time(2+i)*Time(time.Second), Time(8*time.Millisecond), false)
	}
	if took := c.taken(1, 0); took > 8*time.Millisecond {
		t.Errorf("one row is taken to last %v", took)
	}
	c.observe(1, 0, Time(10*time.Second), Time(time.Millisecond), false)
	if took := c.taken(1, 0); took > 5*time.Millisecond {
		t.Errorf("one row took 1 ms when it came again, and is taken to last %v", took)
	}
}

// Nor is a large one, where small ones are known well.
func TestALargeSizeThatWasSeenColdIsTakenToLastAsItsRowsTell(t *testing.T) {
	c := &costs{}
	for i := range 40 {
		c.observe(1+i%4, 0, Time(i)*Time(10*time.Millisecond), Time(time.Millisecond)+Time(i%4)*Time(100*time.Microsecond), i < 4)
	}
	c.observe(32, 0, Time(time.Second), Time(500*time.Millisecond), true)
	if took := c.taken(32, 0); took > 64*time.Millisecond {
		t.Errorf("32 rows are taken to last %v, where 4 take 1.3 ms", took)
	}
}

// What two workers take side by side may be cold, too; they take turns at worst.
func TestASizeThatWasSeenColdBesideOthersIsNotTakenToLastLongerThanInTurns(t *testing.T) {
	c := coldCosts(0)
	c.observe(32, 1, Time(time.Second), Time(300*time.Millisecond), true)
	c.observe(16, 1, Time(2*time.Second), Time(300*time.Millisecond), true)
	for _, rows := range []int{16, 32} {
		if took := c.taken(rows, 1); took > 21*time.Millisecond {
			t.Errorf("%d rows are taken to last %v beside another worker, where 32 alone take 8 ms", rows, took)
		}
	}
	c = coldCosts(1)
	c.observe(32, 0, Time(time.Second), Time(300*time.Millisecond), true)
	if took := c.taken(32, 0); took > 11*time.Millisecond {
		t.Errorf("32 rows are taken to last %v alone, where they take 8 ms beside another worker", took)
	}
}

// A size may be slower than a larger one in truth: it is believed when it was seen
// a few times.
func TestASizeThatIsSlowEachTimeIsBelieved(t *testing.T) {
	c := coldCosts(0)
	for i := range 12 {
		c.observe(24, 0, Time(10+2*i)*Time(time.Second), Time(40*time.Millisecond), i == 0)
		c.observe(32, 0, Time(11+2*i)*Time(time.Second), Time(8*time.Millisecond), false)
	}
	if took := c.taken(24, 0); took < 35*time.Millisecond {
		t.Errorf("24 rows took 40 ms each time, and are taken to last %v", took)
	}
	if took := c.taken(32, 0); took > 9*time.Millisecond {
		t.Errorf("32 rows took 8 ms each time, and are taken to last %v", took)
	}
}

// A worker that joins later is cold again, with all its sizes one after the other.
func TestAWorkerThatJoinsColdIsNoNews(t *testing.T) {
	c := &costs{}
	run := func(from, rounds int, took time.Duration, first bool) {
		for i := range rounds {
			for rows := 1; rows <= 8; rows++ {
				at := time.Duration(from+i)*time.Minute + time.Duration(rows)*time.Second
				c.observe(rows, 0, Time(at), Time(took), first)
			}
		}
	}
	run(0, 10, 5*time.Millisecond, false)
	run(10, 1, 300*time.Millisecond, true)
	for rows := 1; rows <= 8; rows++ {
		if took := c.taken(rows, 0); took > 6*time.Millisecond {
			t.Errorf("%d rows are taken to last %v", rows, took)
		}
	}
	run(11, 1, 50*time.Millisecond, false)
	if took := c.taken(4, 0); took < 25*time.Millisecond {
		t.Errorf("all sizes take ten times as long, and 4 rows are taken to last %v", took)
	}
}

// A size of which little is known follows what it was seen to take at once. When
// that turns out to be news about all sizes, it must not follow once more.
func TestNewsDoesNotMoveASizeThatIsRightAlready(t *testing.T) {
	c := &costs{}
	now := time.Duration(0)
	run := func(rows int, took time.Duration) {
		c.observe(rows, 0, Time(now), Time(took), false)
		now += time.Second
	}
	for range 20 {
		run(8, 10*time.Millisecond)
		run(16, 10*time.Millisecond)
	}
	run(2, 10*time.Millisecond)
	run(4, 10*time.Millisecond)
	for _, rows := range []int{2, 4, 8} {
		run(rows, time.Millisecond)
	}
	for _, rows := range []int{2, 4, 8, 16} {
		if took := c.taken(rows, 0); took < 600*time.Microsecond || took > 1700*time.Microsecond {
			t.Errorf("%d rows are taken to last %v, where all sizes take 1 ms now", rows, took)
		}
	}
}
