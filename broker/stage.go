// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"errors"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/ringbatch/ringbatch/broker/batcher"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
)

// stage is where requests of a ring are batched and run: the batcher, the
// workers with their leases, and what is counted. Only its loop touches it.
type stage struct {
	loop *loop
	ring *ring
	log  *slog.Logger
	cfg  ModelConfig

	settings policy.Settings                 // cfg.Policy in force
	inForce  atomic.Pointer[policy.Settings] // a copy of it, for other goroutines
	changes  int                             // how often cfg has changed

	batcher *batcher.Batcher
	workers []*workerSession // by worker id; nil where unused
	present int              // workers that are there
	staffed atomic.Bool      // there is one, for other goroutines
	vacant  int64            // since when there is none; 0 if there never was one
	busy    []*workerSession // those that have a batch, in any order

	// What the loop has to know of it; see settled.
	dirty    bool // something happened since the last decision
	active   bool // something is queued or runs
	spins    bool // on the loop's list of those that it spins for
	timer    int  // place in the loop's heap of timers, -1 if none
	due      int64
	caughtUp uint64 // the round in which all busy workers were asked last
	arrived  int64  // when the last request came

	wake            int64 // when the batcher wants to be asked again
	runningDeadline int64 // not later than the earliest deadline of a running request
	leaseEnd        int64 // not later than the earliest end of a lease

	since  time.Time
	stats  stageStats
	recent recent

	recorder *recorder // nil while it is off
}

func newStage(r *ring, cfg ModelConfig, settings policy.Settings, b *batcher.Batcher) *stage {
	s := &stage{
		ring: r, log: r.log, cfg: cfg, settings: settings, batcher: b, timer: -1, wake: never, runningDeadline: never, leaseEnd: never, since: time.Now(),
	}
	s.inForce.Store(&settings)
	s.stats.init(settings.MaxBatchSize)
	return s
}

// close gives back the sessions of the workers that are still there.
func (s *stage) close() {
	for _, w := range s.workers {
		if w != nil {
			w.close(s.loop)
		}
	}
}

// touch marks the stage for a decision at the end of this round of the loop. It
// comes before whatever is counted in the round.
func (s *stage) touch() {
	if !s.dirty {
		s.stats.roll(s.loop.now, s.present)
		s.dirty = true
		s.loop.dirty = append(s.loop.dirty, s)
	}
}

// settled tells the loop what it has to know of a stage that has decided.
func (s *stage) settled() {
	s.dirty = false
	s.loop.timers.set(s, min(s.wake, s.runningDeadline, s.leaseEnd))
	if active := s.batcher.Queued() > 0 || len(s.busy) > 0; active != s.active {
		s.active = active
		if active {
			s.loop.active++
		} else {
			s.loop.active--
		}
	}
	if !s.spins && s.waitsForMore() {
		s.spins = true
		s.loop.spinning = append(s.loop.spinning, s)
	}
}

// waitsForMore says that a free worker waits for a batch, and the batch for
// other requests, which often follow at once, from those whose answers came
// together.
func (s *stage) waitsForMore() bool { return s.batcher.Queued() > 0 && s.batcher.IdleWorkers() > 0 }

// apply gives the batcher its policy. While the broker drains nobody can join
// any more: what waits for other requests goes out at once.
func (s *stage) apply(p policy.Settings) error {
	if s.loop.draining {
		p.WaitTime, p.LatencyGoal = 0, 0
	}
	s.touch()
	return s.batcher.SetPolicy(p)
}

func (s *stage) clientJoined(c *clientSession) {
	s.batcher.ClientJoined(batcher.ClientID(c.first))
	s.touch()
}

// cancelSome ends up to most of what a client that left had queued, and
// returns how many there were. With the last of them the batcher forgets it.
func (s *stage) cancelSome(c *clientSession, most int) int {
	s.touch()
	ids := s.batcher.CancelWaiting(batcher.ClientID(c.first), most)
	for _, id := range ids {
		s.stats.ended(status.ErrCanceled)
		s.ring.free(uint32(id))
	}
	if len(ids) < most {
		s.batcher.ClientLeft(batcher.ClientID(c.first))
		c.out = true
	}
	return len(ids)
}

// maxClockSkew bounds how far back a commit may claim to have happened.
const maxClockSkew = time.Second

// arrive takes the request at head into the queue, or says why not. rows is
// what its client asked for.
func (s *stage) arrive(head, rows uint32) status.Code {
	e := &s.ring.slot(head).commit
	now := s.loop.now
	s.stats.requests++
	s.arrived = now
	// A commit from the future, or from long ago, would bend the wait time of
	// others; the client's clock is ours, so this is only damage.
	e.Committed = min(max(e.Committed, now-int64(maxClockSkew)), now)
	if at := batcher.DeadlineOf(&s.settings, int(e.Level), batcher.Time(e.Committed), deadlineOf(e)); at != batcher.Never {
		e.Deadline = int64(at)
	}
	switch {
	case s.loop.draining:
		return status.ErrDraining
	case rows != e.Rows:
		return status.ErrTooLarge
	case s.present == 0 && s.settings.NoWorker == policy.RefuseWithoutWorker:
		return status.ErrNoWorker
	}
	return arriveStatus(s.batcher.Arrive(batcher.Time(now), s.request(head)))
}

// withdraw takes a request out of the queue.
func (s *stage) withdraw(head uint32) { s.batcher.Cancel(batcher.RequestID(head)) }

// request is what the batcher needs to know of the request at head.
func (s *stage) request(head uint32) batcher.Request {
	info := s.ring.slot(head)
	dims := info.commit.Dims
	if s.settings.Ragged {
		dims = batcher.Dims{} // all sizes are one shape
	}
	return batcher.Request{
		ID: batcher.RequestID(head), Client: batcher.ClientID(info.client.first), Rows: int(info.commit.Rows), Level: int(info.commit.Level),
		Arrived: batcher.Time(info.commit.Committed), Deadline: deadlineOf(&info.commit), Dims: dims, Alone: info.attempts > 0,
	}
}

func deadlineOf(e *shm.Commit) batcher.Time {
	if e.Deadline > 0 {
		return batcher.Time(e.Deadline)
	}
	return batcher.Never
}

func arriveStatus(err error) status.Code {
	switch {
	case err == nil:
		return status.OK
	case errors.Is(err, batcher.ErrTooLarge):
		return status.ErrTooLarge
	case errors.Is(err, batcher.ErrQueueFull):
		return status.ErrQueueFull
	case errors.Is(err, batcher.ErrNoLevel):
		return status.ErrNoLevel
	case errors.Is(err, batcher.ErrExpired):
		return status.ErrExpired
	case errors.Is(err, batcher.ErrLate):
		return status.ErrOverloaded
	case errors.Is(err, batcher.ErrTooLong):
		return status.ErrShape
	}
	return status.ErrInvalid
}
