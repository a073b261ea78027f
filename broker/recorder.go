// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"fmt"
	"time"

	"github.com/ringbatch/ringbatch/stats"
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
	requests []recorded
	missed   int // for want of room
	notes    []note
}

type recorded struct {
	committed, dispatched, started, finished int64
	batch                                    uint64
	client                                   *clientSession
	worker                                   int32
	rows                                     uint32
	status                                   status.Code
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

func (r *recorder) add(info *slotInfo, st status.Code, started, finished int64) {
	if len(r.requests) == maxTraceRequests {
		r.missed++
		return
	}
	r.requests = append(r.requests, recorded{info.arrived, info.dispatched, started, finished, info.batch, info.client, int32(info.worker.id), info.commit.Rows, st})
}

// note is something that is no request: a worker that came or went.
func (s *stage) note(text string, w *workerSession) {
	if s.recorder != nil {
		s.recorder.notes = append(s.recorder.notes, note{s.loop.now, fmt.Sprintf("%s: %s (pid %d)", text, w.label(), w.pid)})
	}
}

// trace records a model for so long. The loop is asked twice; the rest is done
// by the caller's goroutine.
func (b *Broker) trace(name string, d time.Duration) (out stats.Trace, err error) {
	if d <= 0 || d > maxTraceTime {
		return out, fmt.Errorf("%w: a recording of %v, must be at most %v", status.ErrInvalid, d, maxTraceTime)
	}
	m, st, err := b.models.takeStage(name)
	if err != nil {
		return out, err
	}
	defer b.models.leave(m)
	mine := newRecorder()
	if !m.do(func() {
		if st.recorder != nil {
			err = fmt.Errorf("%w: somebody is recording %q already; try again when that is over", status.ErrInvalid, name)
			return
		}
		st.recorder = mine
	}) || err != nil {
		if err == nil {
			err = status.ErrDraining
		}
		return out, err
	}
	select {
	case <-time.After(d):
	case <-m.loop.ended:
	}
	var now int64
	m.do(func() {
		st.touch()
		st.catchUp() // what is answered but not read yet is part of it
		st.recorder, now = nil, m.loop.now
	})
	wall := time.Now().UnixMicro()
	at := func(t int64) float64 { return float64(wall) - float64(now-t)/1e3 }
	out = stats.Trace{Model: name, FromUS: at(now - int64(d)), ToUS: at(now), Missed: mine.missed, Requests: make([]stats.TracedRequest, len(mine.requests)), Notes: []stats.TraceNote{}}
	for i, r := range mine.requests {
		out.Requests[i] = stats.TracedRequest{
			Client: r.client.label(), ClientID: int(r.client.first), Worker: int(r.worker), Batch: r.batch, Rows: int(r.rows), End: r.status.Name(),
			CommittedUS: at(r.committed), DispatchedUS: at(r.dispatched), StartedUS: at(r.started), FinishedUS: at(r.finished),
		}
	}
	for _, n := range mine.notes {
		out.Notes = append(out.Notes, stats.TraceNote{AtUS: at(n.at), Text: n.text})
	}
	return out, nil
}
