// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"fmt"
	"slices"

	"github.com/ringbatch/ringbatch/broker/batcher"
	"github.com/ringbatch/ringbatch/status"
)

// A request is run again after its worker died, and after its batch failed as a whole
// (the worker's function raised). Then it goes out in a batch of at most half the size,
// down to one by itself. So only the request that is to blame fails.
//
// Another worker, if one serves, runs a batch again that failed as a whole. A request
// that failed by itself is tried once more by another worker before it fails. Then its
// client is charged for its part of what the failed batches took.

// trouble is the history of a request that is run again. Few requests have one.
type trouble struct {
	attempts int            // workers that died with the request
	hangs    int            // of these, workers that outlived their lease with it
	share    int            // the most requests of its next batch; 0: no limit
	cost     batcher.Time   // its part of what its failed batches took
	lost     batcher.Time   // likewise, perhaps another's fault
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
	if code == status.ErrFailed || code == status.ErrWorkerDied || code == status.ErrWorkerHung {
		t.cost += t.lost
	}
	if code != status.OK && t.cost > 0 {
		info.stage.chargeClient(info.client, t.cost)
	}
	for _, f := range t.failures {
		f.countEnded(info.worker, code)
	}
}

// blame notes the clients of a batch that failed as a whole, or of those with which a worker died. The
// worker, or any of them, may have caused it: only clients that all such batches share pay
// for a request that they give up, or whose deadline passes.
func (s *Stage) blame(clients []*ClientSession) {
	if len(clients) == 0 {
		return
	}
	s.blamed = slices.DeleteFunc(s.blamed, func(c *ClientSession) bool { return !c.isAmong(clients) })
	if s.bad++; len(s.blamed) == 0 {
		s.blamed, s.bad = clients, 1
	}
}

func (s *Stage) isBlamed(c *ClientSession) bool { return s.bad > 2 && c.isAmong(s.blamed) }

// clientsOf adds the clients of a batch's requests.
func (s *Stage) clientsOf(p *mail, clients []*ClientSession) []*ClientSession {
	for _, q := range p.requests {
		if info := s.ring.slot(q.head); s.ring.stillHas(q, p.batch) && !info.client.isAmong(clients) {
			clients = append(clients, info.client)
		}
	}
	return clients
}

// chargeEnded charges for a request of a failed batch that ended while it ran.
func (s *Stage) chargeEnded(c *ClientSession, f *failure) {
	if f.taken && s.isBlamed(c) {
		s.chargeClient(c, f.price)
	}
}

// chargeClient charges what failures cost the workers. For a client that has left, its process pays
// when it attaches again.
func (s *Stage) chargeClient(c *ClientSession, cost batcher.Time) {
	now := batcher.Time(s.loop.now)
	if c.isAttached() {
		s.batcher.Charge(now, batcher.ClientID(c.first), cost)
	} else {
		s.accounts[c.Process] = s.accounts[c.Process].Charged(now, cost)
	}
}

func (s *Stage) owes(c *ClientSession) bool { return s.batcher.Owes(batcher.ClientID(c.first)) }

// retryRequest requeues a request of a failed batch, or says why it may not run again.
//
// In test/model: RetryFailed, Orphan.
func (s *Stage) retryRequest(info *slotInfo, p *mail, f *failure) (whyNot string) {
	t, alone := s.ring.troubleOf(info.head), len(p.requests) == 1
	switch {
	case !f.taken:
	case !s.isBlamed(info.client) && (f.died || !s.owes(info.client)):
		t.lost += f.price
	case s.owes(info.client): // it pays at once
		s.chargeClient(info.client, f.price)
	default:
		t.cost += f.price
	}
	if f.by.faults.has(outlivedLease) && f.by.hungWith == p.batch {
		t.hangs++
	}
	if f.died && f.taken {
		t.attempts++
		t.share, t.by = 1, nil
	}
	switch {
	case t.hangs >= maxHangs:
		return fmt.Sprintf("%d workers were killed because they had this request for longer than the lease, %v", t.hangs, s.settings.Lease)
	case f.died && t.attempts >= s.settings.MaxAttempts || f.taken && f.by.info.RunOnce:
		return fmt.Sprintf("%d workers died running this request", t.attempts)
	case f.died:
		s.stats.requeued++
	case alone && (t.alone != nil || !s.othersServe(f.by)):
		return "it failed by itself"
	default:
		if alone {
			t.alone = f.by
		}
		t.share, t.by, t.failures = max(1, len(p.requests)/2), f.by, append(t.failures, f)
		f.left++
		f.clients = append(f.clients, info.client)
		s.stats.isolated++
	}
	s.ring.setSlots(info.head, queued)
	info.worker = nil
	s.batcher.Requeue(batcher.Time(s.loop.now), s.describeRequest(info))
	return ""
}
