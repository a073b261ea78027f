// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"iter"

	"github.com/ringbatch/ringbatch/broker/batcher"
	"github.com/ringbatch/ringbatch/status"
)

// Every request ends here. cause is why it ends, and effects is what follows.
type cause uint8

const (
	answered   cause = iota // its worker ended it
	orphaned                // its worker ended it and died, perhaps before it rang
	ended                   // the broker ends it
	endedEarly              // likewise, while a worker may still write into its slots
	returned                // it ended early, and now the worker is done with its slots
	abandoned               // it was queued when its client left: no peer reads its end
)

var effects = [...]struct{ writes, reclaims, rings, counts, keeps bool }{
	answered:   {counts: true},
	orphaned:   {counts: true, rings: true},
	ended:      {counts: true, writes: true, rings: true},
	endedEarly: {counts: true, writes: true, rings: true, keeps: true},
	returned:   {reclaims: true, rings: true},
	abandoned:  {counts: true},
}

// ending is what the caller of settle knows.
type ending struct {
	code              status.Code // unless a worker ended it
	reason            string
	started, finished int64 // of its batch; 0: unknown
}

// settle ends a request: on the board, in the statistics, in the batcher and in the books.
// The slots of a request that ends early are held until its worker is done.
//
// In test/model: EndRunning, Reclaim.
func (r *Ring) settle(head uint32, why cause, e ending) {
	info := r.slot(head)
	s, c, wasQueued := info.stage, info.client, info.state == queued
	if info.state == held {
		why = returned
	}
	do := effects[why]
	byWorker := !do.writes || !r.writeEnd(head, e, do.keeps)
	if w := r.board.Word(head); w.Generation() == info.gen {
		e.code = w.Status()
	}
	if do.reclaims && c.isAttached() {
		r.board.Reclaim(head, info.gen)
	}
	switch {
	case !do.counts:
	case !byWorker || why == abandoned:
		s.countEnd(e.code)
	case e.started > 0:
		s.countFinished(info, e.code, e.started, e.finished, false)
	default:
		s.countAnswered(info, e.code)
	}
	if do.rings && c.isAttached() {
		r.board.Ring(c.first)
	}
	if do.keeps {
		r.setSlots(head, held)
		r.held++
		return
	}
	at := batcher.Never
	if e.finished > 0 {
		at = batcher.Time(e.finished)
	}
	if wasQueued {
		s.batcher.Cancel(batcher.RequestID(head))
	} else {
		s.batcher.Ended(batcher.RequestID(head), at)
	}
	r.settleTrouble(head, e.code)
	r.freeSlots(head)
}

// writeEnd writes the broker's end of a request to the board. It returns false if a worker was
// quicker.
func (r *Ring) writeEnd(head uint32, e ending, held bool) bool {
	gen := r.slot(head).gen
	if e.reason != "" {
		r.board.SetReason(head, e.reason)
	}
	if r.board.End(head, gen, e.code, held) {
		return true
	}
	w := r.board.Word(head)
	if w.Generation() == gen {
		return false
	}
	r.log.Warn("a word of the board was damaged", "slot", head, "word", w.String(), "generation", gen)
	r.board.Repair(head, gen, e.code, held)
	return true
}

// settleAnswered settles a request whose answer is on the board, although the worker's "done"
// is not there yet.
func (r *Ring) settleAnswered(head uint32) {
	info := r.slot(head)
	w := r.board.Word(head)
	if w.Generation() != info.gen || w.Held() {
		return
	}
	if info.state == held || w.Status() != status.OK {
		info.worker.countUnanswered(info.batch)
	}
	_, finished := info.stage.timesOnBoard(info)
	r.settle(head, answered, ending{finished: finished})
}

func (r *Ring) freeSlots(head uint32) {
	info := r.slot(head)
	c := info.client
	if info.state == held {
		r.held--
	}
	r.setSlots(head, idle)
	info.stage, info.worker, info.client = nil, nil, nil
	c.busy--
	if c.busy == 0 && c.state == clientLeft {
		r.loop.collectOutcome(outcome{kind: windowUnused, client: c})
	}
}

// runningOn are the requests that run on some workers and have not ended.
func (r *Ring) runningOn(workers ...*WorkerSession) iter.Seq[*slotInfo] {
	return func(yield func(*slotInfo) bool) {
		for _, w := range workers {
			for _, p := range w.mails {
				for _, q := range p.requests {
					if info := r.slot(q.head); info.state == running && r.stillHas(q, p.batch) && !yield(info) {
						return
					}
				}
			}
		}
	}
}
