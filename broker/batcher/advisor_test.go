// SPDX-License-Identifier: Apache-2.0

package batcher

import (
	"slices"

	"github.com/ringbatch/ringbatch/policy"
)

// testAdvisor answers by simple rules, and hashes all events in their order: the Batcher
// and the reference must report the same events.
type testAdvisor struct {
	wait   Time
	hold   Time // how long batches are held back while one runs; 0: not at all
	loaded []BatchID
	events uint64
	clever bool // waits and refusals depend on the queue
}

func (x *testAdvisor) add(kind uint64, values ...int64) {
	x.events = x.events*31 + kind
	for _, v := range values {
		x.events = x.events*1_000_003 + uint64(v)
	}
}

func (x *testAdvisor) SetPolicy(s *policy.Settings) {
	if x.clever = s.WaitTime == policy.Auto; x.clever {
		x.wait = 7
	} else {
		x.wait = Time(s.WaitTime)
	}
	x.add(1, int64(s.WaitTime))
}

func (x *testAdvisor) IsLate(now Time, r Request, q Queue) bool {
	return x.clever && r.Deadline != Never && (int(r.ID)+q.Requests+q.Rows+q.Cost+q.Clients)%7 == 0
}

func (x *testAdvisor) WaitFor(arrived, deadline Time, q Queue) Time {
	if x.clever && deadline != Never {
		return max(0, x.wait-Time(q.Rows+q.Cost))
	}
	return x.wait
}

func (x *testAdvisor) HoldUntil(since Time) Time {
	if x.hold == 0 || len(x.loaded) == 0 {
		return -Never
	}
	return since + x.hold
}

func (x *testAdvisor) WorkerReady(w Worker) { x.add(4, int64(w.ID), int64(w.Depth)) }
func (x *testAdvisor) RequestQueued(now Time, r Request) {
	x.add(6, int64(now), int64(r.ID), int64(r.Deadline), int64(r.Cost))
}
func (x *testAdvisor) RequestEnded(id RequestID, at Time)     { x.add(7, int64(id), int64(at)) }
func (x *testAdvisor) BatchUnanswered(w WorkerID, id BatchID) { x.add(9, int64(w), int64(id)) }
func (x *testAdvisor) Learn(now Time)                         { x.add(11, int64(now)) }

func (x *testAdvisor) WorkerGone(w WorkerID) {
	x.add(5, int64(w))
	x.loaded = nil // as if all had: nothing is held back until a batch is sent
}

func (x *testAdvisor) BatchSent(now Time, d Dispatch) {
	x.add(8, int64(now), int64(d.Worker), int64(d.Batch), int64(d.PadTo), int64(d.Cost))
	x.loaded = append(x.loaded, d.Batch)
}

func (x *testAdvisor) BatchDone(w WorkerID, id BatchID, started, finished Time) {
	x.add(10, int64(w), int64(id), int64(started), int64(finished))
	x.loaded = slices.DeleteFunc(x.loaded, func(b BatchID) bool { return b == id })
}
