// SPDX-License-Identifier: Apache-2.0

package staffing

import (
	"math"
	"time"
)

// Work is what a model has had to do lately.
type Work struct {
	Queued  int           // requests
	Busy    int           // workers with a batch
	Workers int           // attached
	Lanes   int           // batches that they run at once
	Refused uint64        // requests ever that the queue or the latency goal refused
	Goal    time.Duration // latency_goal; 0: none

	Span     time.Duration // of the counts below
	Requests uint64
	Answered uint64
	Computed time.Duration // by all workers
}

// Follower decides how many workers a model has, between least and most.
//
// A load is pressing if the queue takes longer than the latency goal at the present rate, or
// requests were refused; without a goal, if all workers are busy and the queue does not
// shrink. After pressTime of it, the model gets as many workers as carry the load at
// fullLoad, one more at least unless some are still starting. If one worker fewer would
// have carried the load at lightLoad for all of calmTime, and the number has not changed
// for as long, one ends. So on a steady load there is at most one change back and forth a
// minute.
type Follower struct {
	pressed, calm Time // since when; 0: it is not
	changed       Time
	seen          bool
	queued        int
	refused       uint64
}

const (
	pressTime = time.Second
	calmTime  = time.Minute

	fullLoad  = 0.8
	lightLoad = 0.6
)

// Decide returns the number of workers that the model should have. have includes starting ones.
func (f *Follower) Decide(now Time, w *Work, have, least, most int) int {
	least = max(1, least)
	needs, known := w.needs()
	pressing := f.isPressing(w, known)
	f.seen, f.queued, f.refused = true, w.Queued, w.Refused
	light := known && needs <= lightLoad*float64(have-1) || w.Requests == 0 && w.Queued == 0 && w.Busy == 0
	set(&f.pressed, pressing, now)
	set(&f.calm, light && !pressing, now)
	want := have
	switch {
	case pressing && now-f.pressed >= pressTime:
		if w.Workers >= have {
			want = have + 1
		} // else some start, or are started again
		if known {
			want = max(want, int(math.Ceil(needs/fullLoad)))
		}
	case w.Workers < have:
	case f.calm > 0 && now-f.calm >= calmTime && now-f.changed >= calmTime:
		want = have - 1
	}
	if want = min(max(want, least), most); want != have {
		f.changed, f.calm = now, 0
	}
	return want
}

// needs is how many workers the requests of late need, at the rate of late.
func (w *Work) needs() (workers float64, known bool) {
	if w.Answered == 0 || w.Computed <= 0 || w.Workers == 0 {
		return 0, false
	}
	return float64(w.Requests) / w.Span.Seconds() / w.rate(), true
}

// rate is how many requests a second a worker answers while it is busy.
func (w *Work) rate() float64 {
	lanes := float64(max(w.Lanes, w.Workers)) / float64(w.Workers)
	return float64(w.Answered) / w.Computed.Seconds() * lanes
}

func (f *Follower) isPressing(w *Work, known bool) bool {
	switch {
	case !f.seen || w.Workers == 0:
		return false
	case w.Refused > f.refused:
		return true
	case w.Goal > 0 && known:
		return float64(w.Queued) > w.Goal.Seconds()*w.rate()*float64(w.Workers)
	}
	return w.Busy == w.Workers && f.queued > 0 && w.Queued >= f.queued
}

// set keeps since when something holds; 0: it does not.
func set(since *Time, holds bool, now Time) {
	switch {
	case !holds:
		*since = 0
	case *since == 0:
		*since = max(now, 1)
	}
}
