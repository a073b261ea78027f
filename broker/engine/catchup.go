// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"fmt"
	"time"

	"github.com/ringbatch/ringbatch/broker/batcher"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
)

// Only here the books learn of the answers of living workers. A worker answers its client
// first and the broker after, so a client may act on an answer that the broker does not
// know. Therefore the broker catches up before it checks commits, and before it decides.
// It evicts no peer on the way (outcomes.go).

// catchUp reads the "done" messages of all workers that have batches.
func (s *Stage) catchUp() {
	s.caughtUp = s.loop.round
	for i := len(s.busy) - 1; i >= 0; i-- { // backwards, since drainDone may remove a worker
		s.drainDone(s.busy[i])
	}
}

// catchUpWithCommits looks at the slots that a client's commits use again, and at the
// client's last request, which usually caused the commits. The client wrote the entries
// after it saw the answers, and the loop took the entries before it reads the board here.
// So the books know at least what the client saw.
//
// Cancels are not looked at. A worker may die after an answer and before it rings, and
// the broker does not ring for a request that has ended in the books. A client looks at
// all its answers when a commit ends.
func (r *Ring) catchUpWithCommits(c *ClientSession, entries []shm.Commit) {
	for i := range entries {
		e := &entries[i]
		if e.Kind == shm.KindCancel {
			continue
		}
		r.followRequest(c.last)
		if !c.owns(e) {
			continue
		}
		for s := e.Slot; s < e.Slot+r.rowsOf(e); s++ {
			r.followRequest(s)
		}
	}
}

// followRequest frees the request of a slot if its worker has answered it, whether the loop
// finds the worker's "done" or only the word on the board. A held request may have an
// answer, too, if its worker was quicker than its end.
//
// In test/model: Follow in ReadCommit.
func (r *Ring) followRequest(slot uint32) {
	if !r.slot(slot).isWithWorker() {
		return
	}
	info := r.slot(r.slot(slot).head)
	gen := info.gen
	info.stage.drainDone(info.worker)
	if info.isWithWorker() && info.gen == gen {
		r.settleAnswered(info.head)
	}
}

// timesOnBoard is when the worker began and finished an answered request. The worker wrote both before it answered.
func (s *Stage) timesOnBoard(info *slotInfo) (started, finished int64) {
	rec := s.ring.board.Record(info.head)
	started = min(max(rec.Started, info.dispatched), s.loop.now)
	return started, min(max(rec.Finished, started), s.loop.now)
}

// fewWorkers are asked before each client's turn. More busy workers are asked once per round.
const fewWorkers = 16

func (r *Ring) catchUpForClient() {
	for i, s := range r.stages {
		if i == 0 || len(s.busy) > 0 {
			s.touch()
			if s.caughtUp != s.loop.round || len(s.busy) <= fewWorkers {
				s.catchUp()
			}
		}
	}
}

// drainDone reads the worker's "done" messages, and frees the slots of its batches.
//
// In test/model: DrainDone, FinishRequest.
func (s *Stage) drainDone(w *WorkerSession) {
	if w.faults.has(brokeProtocol) {
		return
	}
	n, err := w.done.Pending()
	if n == 0 && err == nil {
		return
	}
	for range n {
		var d shm.Done
		w.done.Take(&d)
		if err = s.finishBatch(w, &d); err != nil {
			break
		}
	}
	w.done.Give()
	s.followLanesOf(w)
	switch {
	case err != nil:
		w.faults |= brokeProtocol
		s.loop.collectOutcome(outcome{kind: brokeRules, worker: w, err: err})
	case w.isDoneAtLast():
		s.loop.collectOutcome(outcome{kind: doneAtLast, worker: w})
	}
}

func (s *Stage) finishBatch(w *WorkerSession, d *shm.Done) error {
	for i, p := range w.mails {
		if p.batch != d.Batch {
			continue
		}
		s.setMails(w, append(w.mails[:i], w.mails[i+1:]...))
		started := min(max(d.Started, p.posted), s.loop.now)
		finished := min(max(d.Finished, started), s.loop.now)
		var failed *failure
		if d.Whole != 0 {
			failed = s.newFailure(w, p)
			s.blame(s.clientsOf(p, nil))
		}
		for _, q := range p.requests {
			if s.ring.stillHas(q, p.batch) && !s.finishRequest(s.ring.slot(q.head), p, failed, started, finished) {
				p.unanswered++
			}
		}
		if failed != nil && failed.left < len(p.requests) {
			failed.excused = true
		}
		if p.unanswered == len(p.requests) {
			s.batcher.Unanswered(w.id, batcher.BatchID(p.batch))
		}
		if i == 0 && len(w.mails) > 0 {
			w.mails[0].begun = max(w.mails[0].begun, finished)
		}
		s.judgeBatch(w, failed != nil, p.unanswered < len(p.requests))
		w.batches++
		w.computed += time.Duration(finished - started)
		s.stats.seconds.spreadComputed(started, finished)
		s.recent.addBatch(batchRecord{
			worker: int32(w.id), rows: p.rows, requests: uint32(len(p.requests)), posted: p.posted, started: started, finished: finished,
		})
		s.batcher.BatchDone(w.id, batcher.BatchID(p.batch), batcher.Time(started), batcher.Time(finished))
		w.spare = append(w.spare, p)
		return nil
	}
	return fmt.Errorf("%w: done with batch %d, which it does not have", status.ErrProtocol, d.Batch)
}

// stillHas reports whether a batch still has a mailed request. The request may have
// ended early, and its slots may be part of another request.
func (r *Ring) stillHas(q mailed, batch uint64) bool {
	info := r.slot(q.head)
	return info.head == q.head && info.gen == q.gen && info.batch == batch && info.isWithWorker()
}

// finishRequest settles a request of a batch that ended, hands it on to the next stage, or runs
// it again after its batch failed. It returns false if the request has no result.
func (s *Stage) finishRequest(info *slotInfo, p *mail, failed *failure, started, finished int64) bool {
	r, e := s.ring, ending{status.ErrFailed, "", started, finished}
	if failed != nil && info.state == held {
		s.chargeEnded(info.client, failed)
	}
	switch w, isHeld := r.board.Word(info.head), info.state == held; {
	case isHeld || w.Generation() == info.gen:
		r.settle(info.head, answered, e)
		return !isHeld && w.Status() == status.OK
	case failed == nil && s.next != nil:
		s.handOnRequest(info.head, started, finished)
		return true
	case failed == nil:
		e.reason = "the worker ended the batch without answering this request"
	case s.retryRequest(info, p, failed) == "":
		return false
	}
	r.settle(info.head, ended, e) // a worker that failed the batch has left the reason on the board
	return false
}

// handOnRequest gives a finished request to the next stage, in the same slots.
//
// In test/model, FinishRequest frees the slots: the model has no next stage.
func (s *Stage) handOnRequest(head uint32, started, finished int64) {
	r, n := s.ring, s.next
	info := r.slot(head)
	s.countEnd(info, ending{status.OK, "", started, finished}, true, true)
	r.settleTrouble(head, status.OK)
	r.setSlots(head, queued)
	info.stage, info.worker, info.arrived = n, nil, s.loop.now
	n.touch()
	code := n.takeRequest(info)
	if code != status.OK {
		r.settle(head, ended, ending{code: code})
	}
}
