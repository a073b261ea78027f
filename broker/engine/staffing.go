// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"time"

	"github.com/ringbatch/ringbatch/broker/staffing"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
)

// The broker ends idle workers, and starts them again for a request (package staffing). A
// stage reports its load, and a request that waits for a worker. Its ring, clients and queue
// do not change meanwhile.

// Staffing is how a stage gets workers.
type Staffing struct {
	// Want asks for workers, since a request waits and none is attached. Then requests wait,
	// also with no_worker=refuse. It may not wait. nil: the broker starts no workers for a request.
	Want func()
	// Failed: workers could not be started. Then requests end as NoWorker.
	Failed bool
	Why    string // why no worker is attached, for the requests that end meanwhile
}

// SetStaffing changes how the stages get workers; false if the ring is gone. No loop calls it.
func (r *Ring) SetStaffing(f Staffing) bool {
	return r.Do(func() {
		for _, s := range r.stages {
			if s.staffing = f; f.Failed && s.present == 0 {
				s.refuseQueued(ending{code: status.ErrNoWorker, reason: s.whyNoWorker()})
			}
			s.wantWorkers()
		}
	})
}

// wantWorkers asks for workers if requests wait and none is attached.
func (s *Stage) wantWorkers() {
	if s.present == 0 && s.staffing.Want != nil && s.batcher.Queued() > 0 {
		s.staffing.Want()
	}
}

// whyNoWorker is the reason of requests that end while no worker is attached. Clients show
// a reason that begins so.
func (s *Stage) whyNoWorker() string {
	if s.staffing.Why == "" {
		return shm.ReasonNoWorker
	}
	return shm.ReasonNoWorker + ": " + s.staffing.Why
}

// refusesWithoutWorker says that a request that comes now ends as NoWorker.
func (s *Stage) refusesWithoutWorker() bool {
	return s.present == 0 && (s.staffing.Failed || s.staffing.Want == nil && s.settings.NoWorker == policy.RefuseWithoutWorker)
}

// Load is what a stage has to do.
type Load struct {
	staffing.Work               // without the goal; Span is as many whole seconds as had answers: 1, 10 or 60
	Idle          time.Duration // since the last request; since the stage was made if there was none
}

var loadSpans = []int64{1, 10, 60}

// Loads is the load of each stage; false if the ring is gone. No loop calls it.
func (r *Ring) Loads() (list []Load, ok bool) {
	ok = r.Do(func() {
		for _, s := range r.stages {
			list = append(list, s.load())
		}
	})
	return list, ok
}

func (s *Stage) load() Load {
	now := s.loop.now
	v := Load{staffing.Work{Queued: s.batcher.Queued(), Workers: s.present}, time.Since(s.since)}
	if s.arrived > 0 {
		v.Idle = time.Duration(now - s.arrived)
	}
	for _, code := range []status.Code{status.ErrOverloaded, status.ErrQueueFull, status.ErrQueueTimeout} {
		v.Refused += s.stats.byStatus[code]
	}
	for _, w := range s.busy {
		if n, err := w.done.Pending(); err != nil || n < len(w.mails) { // else it has finished all
			v.Busy++
		}
	}
	for _, w := range s.workers {
		if w != nil {
			v.Lanes += w.desc.Lanes
		}
	}
	s.stats.rollSecond(now, s.present)
	for _, seconds := range loadSpans {
		v.Span = time.Duration(seconds) * time.Second
		v.Requests, v.Answered, v.Computed = s.stats.seconds.sumUp(now, seconds)
		if v.Answered > 0 {
			break
		}
	}
	return v
}

// sumUp adds up the last whole seconds.
func (s *seconds) sumUp(now, length int64) (requests, answered uint64, computed time.Duration) {
	for number := now/int64(time.Second) - length; number < now/int64(time.Second); number++ {
		if c := &s.cells[(number+keptSeconds)%keptSeconds]; c.number == number {
			requests, answered, computed = requests+c.requests, answered+c.ok, computed+time.Duration(c.computed)
		}
	}
	return requests, answered, computed
}
