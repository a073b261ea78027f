// SPDX-License-Identifier: Apache-2.0

package client

import (
	"time"

	"github.com/ringbatch/ringbatch/status"
)

// Timing says where a request's time went.
type Timing struct {
	Claim    time.Duration // waiting for room in the window
	Write    time.Duration // from Claim to Commit: writing the inputs; only with WithTiming
	Queue    time.Duration // from Commit until the broker dispatched the request
	Dispatch time.Duration // from then until the worker started it
	Compute  time.Duration // the worker's function
	Wake     time.Duration // from its end until this client noticed
}

// Timing reports where an ended request's time went.
func (r Request) Timing() (Timing, error) {
	s, err := r.slot()
	if err != nil {
		return Timing{}, err
	}
	if s.state == slotClaimed || !r.link.hasEnded(r.at) {
		return Timing{}, status.ErrNotDone
	}
	span := func(from, to int64) time.Duration { return time.Duration(max(0, to-from)) }
	t := Timing{Claim: time.Duration(s.claimTook)}
	if s.claimed != 0 {
		t.Write = span(s.claimed, s.committed)
	}
	if s.status != status.OK {
		t.Queue = span(s.committed, s.seen)
		return t, nil
	}
	rec := r.link.board.Record(r.link.first + r.at)
	t.Queue = span(s.committed, rec.Dispatched)
	t.Dispatch = span(rec.Dispatched, rec.Started)
	t.Compute = span(rec.Started, rec.Finished)
	t.Wake = span(rec.Finished, s.seen)
	return t, nil
}
