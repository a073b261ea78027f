// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"github.com/ringbatch/ringbatch/broker/batcher"
	"github.com/ringbatch/ringbatch/status"
)

// A request is run again after its worker died, and after its batch failed as a whole
// (the worker's function raised). Then it goes out in a batch of at most half the size,
// down to one by itself. So only the request that is to blame fails.
//
// Another worker, if one serves, runs a batch again that failed as a whole. A request
// that failed by itself is tried once more by another worker before it fails.

// trouble is the history of a request that is run again. Few requests have one.
type trouble struct {
	attempts int            // workers that died with the request
	hangs    int            // of these, workers that outlived their lease with it
	share    int            // the most requests of its next batch; 0: no limit
	by       *WorkerSession // that failed its last batch as a whole; nil: none
	alone    *WorkerSession // that failed it when it was by itself; nil: none
	failures []*failure     // the batches that failed with it
}

func (r *Ring) troubleOf(head uint32) *trouble {
	info := r.slot(head)
	if !info.troubled {
		info.troubled = true
		r.troubles[head] = &trouble{}
	}
	return r.troubles[head]
}

// avoidedWorker is the worker that should not get the request.
func (t *trouble) avoidedWorker() batcher.WorkerID {
	if t.by == nil || t.by.state == workerGone {
		return batcher.NoWorker
	}
	return t.by.id
}

// settleTrouble forgets the history of a request that has ended at its stage.
func (r *Ring) settleTrouble(head uint32, code status.Code) {
	info := r.slot(head)
	if !info.troubled {
		return
	}
	t := r.troubles[head]
	delete(r.troubles, head)
	info.troubled = false
	for _, f := range t.failures {
		f.countEnded(info.worker, code)
	}
}

func (s *Stage) requeueRequest(head uint32) {
	info := s.ring.slot(head)
	s.ring.setSlots(head, queued)
	info.worker = nil
	s.batcher.Requeue(batcher.Time(s.loop.now), s.describeRequest(info))
}

// retryFailedRequest requeues a request of a batch that failed as a whole. It returns
// false if the request has ended, with the failure or an earlier answer.
//
// In test/model: RetryFailed.
func (s *Stage) retryFailedRequest(q mailed, p *mail, f *failure) bool {
	r := s.ring
	info := r.slot(q.head)
	if !r.stillHas(q, p.batch) || info.state != running || r.board.Word(q.head).Generation() == q.gen {
		f.excused = true
		return false // the request has ended, or the worker has answered it
	}
	t := r.troubleOf(q.head)
	if f.by.faults.has(outlivedLease) && f.by.hungWith == p.batch {
		t.hangs++
	}
	alone := len(p.requests) == 1
	if f.by.info.RunOnce || t.hangs >= maxHangs || (alone && (t.alone != nil || !s.othersServe(f.by))) {
		// The worker left the text on the board.
		r.board.End(q.head, q.gen, status.ErrFailed, false)
		r.board.Ring(info.client.first)
		return false
	}
	if alone {
		t.alone = f.by
	}
	t.share, t.by = max(1, len(p.requests)/2), f.by
	t.failures = append(t.failures, f)
	f.left++
	s.stats.isolated++
	s.requeueRequest(q.head)
	return true
}
