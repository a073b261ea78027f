// SPDX-License-Identifier: Apache-2.0

package relay

import (
	"math/bits"
	"time"
)

// pace is the least time that messages of one size need beside the waiting and
// the computing that the host reports: the way there and back, and what relay,
// network and gateway do. What a message needs beyond that it has waited for,
// be it a core, the connection or the host's queue.
type pace struct {
	least [64]recentLeast // by the bits of the message's size
}

// recentLeast is the least of the last one to two epochs, so that a way that
// became longer is learned.
type recentLeast struct {
	now, before time.Duration
	since       time.Time
}

const paceEpoch = 10 * time.Second

// learn takes a message into account, and gives the least time for its size.
func (p *pace) learn(bytes int, took time.Duration, at time.Time) time.Duration {
	r := &p.least[bits.Len(uint(bytes))]
	if at.Sub(r.since) > paceEpoch {
		r.before, r.since = r.now, at
		if at.Sub(r.since) > 2*paceEpoch {
			r.before = 0
		}
		r.now = took
	}
	r.now = min(r.now, took)
	if r.before > 0 {
		return min(r.now, r.before)
	}
	return r.now
}
