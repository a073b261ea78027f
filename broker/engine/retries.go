// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"fmt"

	"github.com/ringbatch/ringbatch/broker/batcher"
	"github.com/ringbatch/ringbatch/status"
)

// A request is run again after its worker died, and after its batch failed as a whole
// (the worker's function raised). Then it goes out in a batch of at most half the size,
// down to one by itself. So only the request that is to blame fails.
//
// Another worker, if one serves, runs a batch again that failed as a whole. A request
// that failed by itself is tried once more by another worker before it fails.
//
// What failed batches and dead workers cost is charged to the clients whose requests end
// with an error, each for its part of the batch. The batcher keeps the accounts.

// trouble is the history of a request that is run again. Few requests have one.
type trouble struct {
	attempts int            // workers that died with the request
	hangs    int            // of these, workers that outlived their lease with it
	share    int            // the most requests of its next batch; 0: no limit
	cost     batcher.Time   // its part of what its failed batches took
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
	if code != status.OK && t.cost > 0 {
		info.stage.chargeClient(info.client, t.cost)
	}
	for _, f := range t.failures {
		f.countEnded(info.worker, code)
	}
}

// chargeClient charges what failures cost the workers. A client that has left pays nothing.
func (s *Stage) chargeClient(c *ClientSession, cost batcher.Time) {
	if c.isAttached() {
		s.batcher.Charge(batcher.Time(s.loop.now), batcher.ClientID(c.first), cost)
	}
}

func (s *Stage) owes(c *ClientSession) bool { return s.batcher.Owes(batcher.ClientID(c.first)) }

// bill notes what a failure cost because of a request. A client in debt pays at once.
func (s *Stage) bill(info *slotInfo, cost batcher.Time) *trouble {
	t := s.ring.troubleOf(info.head)
	if s.owes(info.client) {
		s.chargeClient(info.client, cost)
	} else {
		t.cost += cost
	}
	return t
}

func (s *Stage) requeueRequest(info *slotInfo) {
	s.ring.setSlots(info.head, queued)
	info.worker = nil
	s.batcher.Requeue(batcher.Time(s.loop.now), s.describeRequest(info))
}

// retryFailedRequest requeues a request of a batch that failed as a whole. It returns
// false if the request fails.
//
// In test/model: RetryFailed.
func (s *Stage) retryFailedRequest(info *slotInfo, p *mail, f *failure) bool {
	t := s.bill(info, f.price)
	if f.by.faults.has(outlivedLease) && f.by.hungWith == p.batch {
		t.hangs++
	}
	alone := len(p.requests) == 1
	if f.by.info.RunOnce || t.hangs >= maxHangs || (alone && (t.alone != nil || !s.othersServe(f.by))) {
		return false
	}
	if alone {
		t.alone = f.by
	}
	t.share, t.by = max(1, len(p.requests)/2), f.by
	t.failures = append(t.failures, f)
	f.left++
	f.clients = append(f.clients, info.client)
	s.stats.isolated++
	s.requeueRequest(info)
	return true
}

// retryOrphan requeues a request of a dead worker's batch. It returns false if the request has
// ended: before the death, or because it has had all its attempts. taken says that the worker
// may have begun the batch.
//
// In test/model: Orphan.
func (s *Stage) retryOrphan(info *slotInfo, p *mail, taken bool, price batcher.Time) bool {
	w := info.worker
	if info.state == held || s.ring.board.Word(info.head).Generation() == info.gen {
		s.ring.settle(info.head, orphaned, ending{})
		return false
	}
	t := s.ring.troubleOf(info.head)
	if taken {
		s.bill(info, price)
		t.attempts++
		t.share, t.by = 1, nil
	}
	if w.faults.has(outlivedLease) && p.batch == w.hungWith {
		t.hangs++
	}
	if t.attempts >= s.settings.MaxAttempts || t.hangs >= maxHangs || (taken && w.info.RunOnce) {
		reason := fmt.Sprintf("%d workers died running this request", t.attempts)
		if t.hangs >= maxHangs {
			reason = fmt.Sprintf("%d workers were killed because they had this request for longer than the lease, %v",
				t.hangs, s.settings.Lease)
		}
		s.ring.settle(info.head, ended, ending{code: status.ErrWorkerDied, reason: reason})
		return false
	}
	s.stats.requeued++
	s.requeueRequest(info)
	return true
}
