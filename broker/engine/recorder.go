// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"fmt"
	"time"

	"github.com/ringbatch/ringbatch/admin/stats"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
)

// Limits of a recording: it lies in the broker's memory.
const (
	maxTraceTime     = time.Minute
	maxTraceRequests = 1 << 15
)

// recorder is the flight recorder of one stage while it is on: what happened to
// each request that a worker answered. While it is off it costs one comparison.
type recorder struct {
	began    int64
	requests []recorded
	over     bool // nothing more is taken, but times may still be read
	missed   int  // for want of room
	notes    []note
}

type recorded struct {
	committed, dispatched, started, finished int64
	asked, claimed, woken                    int64 // 0: not known
	batch                                    uint64
	client                                   *ClientSession
	slot, gen                                uint32
	worker                                   int32
	rows                                     uint32
	status                                   status.Code
	read                                     bool // the client's times
}

type note struct {
	at   int64
	text string
}

// newRecorder has its memory, and its pages, before the loop writes to them.
func newRecorder() *recorder {
	requests := make([]recorded, maxTraceRequests)
	clear(requests)
	return &recorder{requests: requests[:0]}
}

func (r *recorder) takesMore() bool { return r != nil && !r.over }

// recordRequest takes down a request that its worker has answered.
func (s *Stage) recordRequest(info *slotInfo, st status.Code, started, finished int64) {
	r := s.recorder
	if len(r.requests) == maxTraceRequests {
		if r.missed++; r.missed == 1 {
			s.ring.wantTimes(false)
		}
		return
	}
	info.traced = int32(len(r.requests))
	r.requests = append(r.requests, recorded{
		committed: info.arrived, dispatched: info.dispatched, started: started, finished: finished,
		batch: info.batch, client: info.client, slot: info.head, gen: info.gen, worker: int32(info.worker.id), rows: info.commit.Rows, status: st,
	})
}

// wantTimes has the clients tell their times, or no longer.
func (r *Ring) wantTimes(on bool) {
	for c := range r.clients {
		c.times.Want(on)
	}
}

// A client's times of a request are read when that costs least: when the next
// commit of its slot comes, when the client leaves, and when the recording ends.
// Without these times the rest of the request is still recorded.

// readBefore reads of the request that was in a commit's slot before.
func (r *recorder) readBefore(c *ClientSession, e *shm.Commit) {
	if i := int(c.ring.slot(e.Slot).traced); i < len(r.requests) {
		if q := &r.requests[i]; q.client == c && q.slot == e.Slot && q.gen == e.Gen-1 {
			r.readTimes(q)
		}
	}
}

// readTurn is for how many requests times are read in one go.
const readTurn = 1024

// readLast reads of what a client that leaves was answered last.
func (r *recorder) readLast(c *ClientSession) {
	if r == nil {
		return
	}
	for i := len(r.requests) - 1; i >= max(0, len(r.requests)-readTurn); i-- {
		if r.requests[i].client == c {
			r.readTimes(&r.requests[i])
		}
	}
}

// readTimes believes a client's times as far as they fit what the broker knows.
func (r *recorder) readTimes(q *recorded) {
	if q.read {
		return
	}
	q.read = true
	asked, claimed, woken, ok := q.client.times.Read(q.slot-q.client.first, q.gen)
	if !ok {
		return
	}
	l := q.client.ring.loop
	now := l.now
	if claimed > now || woken > now { // since the round began, if ever
		now = l.clock()
	}
	if claimed >= r.began && claimed <= now {
		q.claimed = min(claimed, q.committed) // a commit counts as of the round in which it was read
		q.asked = min(max(asked, r.began), q.claimed)
	}
	if woken >= q.committed && woken <= now {
		q.woken = max(woken, q.finished) // who wakes for many reads the clock once
	}
}

// noteWorker is something that is no request: a worker that came or went.
func (s *Stage) noteWorker(text string, w *WorkerSession) {
	if s.recorder != nil {
		s.recorder.notes = append(s.recorder.notes, note{s.loop.now, fmt.Sprintf("%s: %s (pid %d)", text, w.Label(), w.Pid)})
	}
}

// Trace records the stage's requests for a time, or until over is closed. It is called
// away from the loop.
func (s *Stage) Trace(d time.Duration, over <-chan struct{}) (out stats.Trace, err error) {
	if d <= 0 || d > maxTraceTime {
		return out, fmt.Errorf("%w: a recording of %v, must be at most %v", status.ErrInvalid, d, maxTraceTime)
	}
	mine := newRecorder()
	if !s.ring.Do(func() { err = s.beginRecording(mine) }) {
		err = status.ErrDraining
	}
	if err != nil {
		return out, err
	}
	select {
	case <-time.After(d):
	case <-over:
	case <-s.loop.ended:
	}
	now := s.endRecording(mine)
	wall := time.Now().UnixMicro()
	at := func(t int64) float64 { return float64(wall) - float64(now-t)/1e3 }
	known := func(t int64) float64 {
		if t == 0 {
			return 0
		}
		return at(t)
	}
	out = stats.Trace{
		Model: s.name, FromUS: at(now - int64(d)), ToUS: at(now), Missed: mine.missed,
		Requests: make([]stats.TracedRequest, len(mine.requests)), Notes: []stats.TraceNote{},
	}
	for i, r := range mine.requests {
		out.Requests[i] = stats.TracedRequest{
			Client: r.client.Label(), ClientID: int(r.client.first), Worker: int(r.worker), Batch: r.batch, Rows: int(r.rows), End: r.status.Name(),
			AskedUS: known(r.asked), ClaimedUS: known(r.claimed), WokenUS: known(r.woken),
			CommittedUS: at(r.committed), DispatchedUS: at(r.dispatched), StartedUS: at(r.started), FinishedUS: at(r.finished),
		}
	}
	for _, n := range mine.notes {
		out.Notes = append(out.Notes, stats.TraceNote{AtUS: at(n.at), Text: n.text})
	}
	return out, nil
}

// beginRecording is called on the loop.
func (s *Stage) beginRecording(r *recorder) error {
	if s.recorder != nil {
		return fmt.Errorf("%w: somebody is recording %q already; try again when that is over", status.ErrInvalid, s.name)
	}
	s.touch()
	s.catchUp() // requests that were answered before are no part of it
	r.began = s.loop.now
	s.recorder = r
	s.ring.wantTimes(true)
	return nil
}

// endRecording stops it, reads the times that clients have told by now, and says when
// that was.
func (s *Stage) endRecording(r *recorder) (now int64) {
	now = shm.Now() // if the ring is gone
	s.ring.Do(func() {
		s.touch()
		s.catchUp() // requests that are answered but not read yet are part of it
		r.over, now = true, s.loop.now
		s.ring.wantTimes(false)
	})
	for from := 0; from < len(r.requests); from += readTurn {
		s.ring.Do(func() {
			for i := from; i < min(from+readTurn, len(r.requests)); i++ {
				if q := &r.requests[i]; q.client.isAttached() {
					r.readTimes(q)
				}
			}
		})
	}
	s.ring.Do(func() { s.recorder = nil })
	return now
}
