// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"fmt"
	"time"

	"github.com/ringbatch/ringbatch/admin/stats"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
)

// Recordings of a stage's requests (ringbatch trace), their limits, and its last batches.
const (
	maxTraceTime     = time.Minute
	maxTraceRequests = 1 << 15
)

// recorder is the flight recorder of one stage while it is on. It records the times of
// each request that a worker answers. While it is off it costs one comparison.
type recorder struct {
	began    int64
	requests []recorded
	over     bool // it takes no more requests, but may still read times
	missed   int  // requests that had no room
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
	version                                  uint32 // of live weights
	status                                   status.Code
	read                                     bool // the client's times were read
}

type note struct {
	at   int64
	text string
}

// newRecorder touches its pages, so that the loop need not.
func newRecorder() *recorder {
	requests := make([]recorded, maxTraceRequests)
	clear(requests)
	return &recorder{requests: requests[:0]}
}

func (r *recorder) takesMore() bool { return r != nil && !r.over }

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
		batch: info.batch, client: info.client, slot: info.head, gen: info.gen, worker: int32(info.worker.id),
		rows: info.commit.Rows, status: st, version: s.ring.board.Record(info.head).Version,
	})
}

func (r *Ring) wantTimes(on bool) {
	for c := range r.clients {
		c.times.Want(on)
	}
}

// The recorder reads a client's times of a request when that costs least: at the next
// commit of the slot, when the client leaves, and when the recording ends.

// readPreviousTimes reads the times of the previous request in a commit's slot.
func (r *recorder) readPreviousTimes(c *ClientSession, e *shm.Commit) {
	if i := int(c.ring.slot(e.Slot).traced); i < len(r.requests) {
		if q := &r.requests[i]; q.client == c && q.slot == e.Slot && q.gen == e.Gen-1 {
			r.readTimes(q)
		}
	}
}

// readTurn is the most requests whose times are read in one post.
const readTurn = 1024

func (r *recorder) readLastTimes(c *ClientSession) {
	if r == nil {
		return
	}
	for i := len(r.requests) - 1; i >= max(0, len(r.requests)-readTurn); i-- {
		if r.requests[i].client == c {
			r.readTimes(&r.requests[i])
		}
	}
}

// readTimes takes over a client's times as far as they fit the broker's.
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
	if claimed > now || woken > now { // since the round began
		now = l.clock()
	}
	if claimed >= r.began && claimed <= now {
		q.claimed = min(claimed, q.committed) // committed is the time of the round that read it
		q.asked = min(max(asked, r.began), q.claimed)
	}
	if woken >= q.committed && woken <= now {
		q.woken = max(woken, q.finished) // a client reads the clock once for many answers
	}
}

func (s *Stage) noteWorker(text string, w *WorkerSession) {
	if s.recorder != nil {
		s.recorder.notes = append(s.recorder.notes, note{s.loop.now, fmt.Sprintf("%s: %s (pid %d)", text, w.Label(), w.Pid)})
	}
}

// Trace records the stage's requests for a time, or until over is closed. No loop calls it.
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
			Client: r.client.Label(), ClientID: int(r.client.first), Worker: int(r.worker), Batch: r.batch,
			Rows: int(r.rows), End: r.status.Name(), Version: uint32(r.version),
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
		return fmt.Errorf("%w: another recording of %q is running; try again when it is over", status.ErrInvalid, s.name)
	}
	s.touch()
	s.catchUp() // earlier answers are no part of it
	r.began = s.loop.now
	s.recorder = r
	s.ring.wantTimes(true)
	return nil
}

// endRecording stops the recording, reads the clients' times, and returns the end's time.
func (s *Stage) endRecording(r *recorder) (now int64) {
	now = shm.Now() // if the ring is gone
	s.ring.Do(func() {
		s.touch()
		s.catchUp() // answers that the loop has not read yet are part of it
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

const recentBatches = 1024

// recent is the last finished batches. Its memory is made with the first of them.
type recent struct {
	ring  []batchRecord
	count uint64 // ever
}

type batchRecord struct {
	worker                    int32
	rows, requests            uint32
	posted, started, finished int64
}

func (r *recent) addBatch(b batchRecord) {
	if r.ring == nil {
		r.ring = make([]batchRecord, recentBatches)
	}
	r.ring[r.count%recentBatches] = b
	r.count++
}

// BatchesSince lists the stage's remembered batches after a count. No loop calls it.
func (s *Stage) BatchesSince(since uint64) (out stats.Batches, ok bool) {
	var records []batchRecord
	var now, wall int64 // the same moment on both clocks
	if !s.ring.Do(func() {
		r := &s.recent
		now, wall = s.loop.clock(), time.Now().UnixMicro()
		first := max(min(since, r.count), r.count-min(r.count, recentBatches))
		for i := first; i < r.count; i++ {
			records = append(records, r.ring[i%recentBatches])
		}
		out.Count = r.count
	}) {
		return out, false
	}
	at := func(t int64) int64 { return wall - (now-t)/1000 }
	out.NowUS, out.Batches = wall, make([]stats.Batch, len(records))
	for i, r := range records {
		out.Batches[i] = stats.Batch{
			Worker: int(r.worker), Rows: int(r.rows), Requests: int(r.requests),
			PostedUS: at(r.posted), StartedUS: at(r.started), FinishedUS: at(r.finished),
		}
	}
	return out, true
}
