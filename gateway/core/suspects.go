// SPDX-License-Identifier: Apache-2.0

package core

import (
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ringbatch/ringbatch/status"
)

// standing is a caller's account of requests that failed in a worker. Each counts for
// failureTime, up to longestSuspicion in all.
//
//	good ──more than sparedFailures count──► suspect ──at most as many count──► good
type standing struct {
	until atomic.Int64 // the last failure counts until then, in nanoseconds of Unix time
}

// failed counts a failure, and reports whether it makes the caller a suspect.
func (s *standing) failed() bool {
	now, most := time.Now().UnixNano(), int64(sparedFailures*failureTime)
	for {
		old := s.until.Load()
		until := min(max(old, now)+int64(failureTime), now+int64(longestSuspicion))
		if s.until.CompareAndSwap(old, until) {
			return old <= now+most && until > now+most
		}
	}
}

// left is the time until every failure is forgotten.
func (s *standing) left() time.Duration {
	until := s.until.Load()
	if until == 0 {
		return 0
	}
	return time.Duration(max(0, until-time.Now().UnixNano()))
}

func (s *standing) isSuspect() bool { return s.left() > sparedFailures*failureTime }

// failedInWorker reports whether the broker charges an error to the client.
func failedInWorker(err error) bool {
	return errors.Is(err, status.ErrFailed) || errors.Is(err, status.ErrWorkerDied) || errors.Is(err, status.ErrWorkerHung)
}

// suspects are a model's clients for suspect callers: the broker charges failures to the
// client, and other callers must not pay. The first suspects have a client each, the others
// share the last one. They have as many slots as callers in good standing.
type suspects struct {
	mu     sync.Mutex
	owners [suspectLanes - 1]*Usage
	lanes  [suspectLanes]lane
	full   time.Time // the ring had no room for another client
}

// suspectLane returns the lane of a suspect, its window, and whether the lane is the
// caller's alone. It returns nil for other callers, and while the ring has no room.
func (k *Model) suspectLane(u *Usage) (lane *lane, window int, alone bool) {
	if !u.isSuspect() {
		return nil, 0, false
	}
	_, window = k.lane(2)
	s := &k.suspects
	s.mu.Lock()
	defer s.mu.Unlock()
	if time.Since(s.full) < time.Second {
		return nil, 0, false
	}
	free := len(s.owners)
	for i, owner := range s.owners {
		if owner == u {
			free = i
			break
		}
		if owner == nil || !owner.isSuspect() {
			free = min(free, i)
		}
	}
	if free == len(s.owners) {
		return &s.lanes[free], window, false
	}
	s.owners[free] = u
	return &s.lanes[free], shareOf(window, k.info.Load().settings.MaxBatchSize), true
}

func (s *suspects) noteFull() {
	s.mu.Lock()
	s.full = time.Now()
	s.mu.Unlock()
}
