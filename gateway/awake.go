// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"sync/atomic"
	"time"
)

// awake is the clock that callers are watched with. It does not count time in
// which the gateway could not run: a machine that was suspended or moved, or a
// process that was frozen, says nothing about how quick its callers are. Nor
// does it follow when the time of day is set.
type awake struct {
	epoch time.Time
	stood atomic.Int64 // nanoseconds that are not counted
	last  time.Time    // the last tick; of the one who ticks
}

// standstill is how late a tick comes if the gateway could not run.
const standstill = 10 * hangUpInterval

func newAwake() *awake {
	return &awake{epoch: time.Now().Add(-time.Hour)} // no moment from now on is 0
}

// at is a moment on this clock.
func (a *awake) at(t time.Time) int64 { return int64(t.Sub(a.epoch)) - a.stood.Load() }

func (a *awake) now() int64 { return a.at(time.Now()) }

// tick is called every hangUpInterval, unless the gateway stands still, and
// gives the present moment.
func (a *awake) tick(t time.Time) int64 {
	if gap := t.Sub(a.last); !a.last.IsZero() && gap > standstill {
		a.stood.Add(int64(gap - hangUpInterval))
	}
	a.last = t
	return a.at(t)
}
