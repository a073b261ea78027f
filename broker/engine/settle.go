// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"cmp"
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

var effects = [...]struct{ writes, reclaims, rings, keeps bool }{
	answered:   {},
	orphaned:   {rings: true},
	ended:      {rings: true, writes: true},
	endedEarly: {rings: true, writes: true, keeps: true},
	returned:   {rings: true, reclaims: true}, // it was counted when it ended
	abandoned:  {},
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
	s, c, byWorker := info.stage, info.client, info.state != queued
	if info.state == held {
		why = returned
	}
	do := effects[why]
	if do.writes {
		byWorker = !r.writeEnd(head, e, do.keeps)
	}
	if w := r.board.Word(head); w.Generation() == info.gen {
		e.code = w.Status()
	}
	switch {
	case !do.reclaims:
		s.countEnd(info, e, byWorker, false)
	case c.isAttached():
		r.board.Reclaim(head, info.gen)
	}
	if do.rings && c.isAttached() {
		r.board.Ring(c.first)
	}
	if do.keeps {
		r.setSlots(head, held)
		r.held++
		return
	}
	s.batcher.Cancel(batcher.RequestID(head)) // if it waits
	s.batcher.Ended(batcher.RequestID(head), cmp.Or(batcher.Time(e.finished), batcher.Never))
	r.settleTrouble(head, e.code)
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

// writeEnd writes a request's end to the board. It returns false if a worker was quicker.
func (r *Ring) writeEnd(head uint32, e ending, held bool) bool {
	gen := r.slot(head).gen
	if e.reason != "" {
		r.board.SetReason(head, e.reason)
		r.slot(head).unserved = e.code == status.ErrExpired || e.code == status.ErrNoWorker
	}
	if r.board.End(head, gen, e.code, held) {
		return true
	}
	w := r.board.Word(head)
	if w.Generation() != gen {
		r.log.Warn("a word of the board was damaged", "slot", head, "word", w.String(), "generation", gen)
		r.board.Repair(head, gen, e.code, held)
	}
	return w.Generation() != gen
}

// settleAnswered settles a request if its answer is on the board, before the worker's "done".
func (r *Ring) settleAnswered(head uint32) {
	info := r.slot(head)
	w := r.board.Word(head)
	if w.Generation() != info.gen || w.Held() {
		return
	}
	for _, p := range info.worker.mails {
		if p.batch == info.batch && (info.state == held || w.Status() != status.OK) {
			p.unanswered++
		}
	}
	_, finished := info.stage.timesOnBoard(info)
	r.settle(head, answered, ending{finished: finished})
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
