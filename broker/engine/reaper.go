// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"fmt"
	"time"

	"github.com/ringbatch/ringbatch/broker/batcher"
	"github.com/ringbatch/ringbatch/status"
)

// workerLost handles the end of a worker's connection.
func (s *Stage) workerLost(w *WorkerSession, why string) {
	w.faults |= hungUp
	if w.state != workerGone {
		s.touch()
		s.drainDone(w) // batches that it finished before it left count
		s.evictWorker(w, why)
	}
}

// disconnectWorker parts with a worker that broke the protocol.
func (s *Stage) disconnectWorker(w *WorkerSession, err error) {
	s.log.Warn("worker disconnected: it broke the protocol", "worker", w.Label(), "pid", w.Pid, "reason", err)
	s.touch()
	s.stats.offenders++
	s.loop.outside.Offended(w.Process)
	s.evictWorker(w, "it broke the protocol")
}

// evictWorker parts with a worker whose connection is of no more use. Batches that
// it never took simply go to others. If it took some, it may still be
// writing: then it must be dead before their slots are used again.
func (s *Stage) evictWorker(w *WorkerSession, why string) {
	if w.state == workerGone || w.state == workerDying {
		return
	}
	for _, p := range w.mails {
		if w.faults.has(brokeProtocol) || p.number < w.box.Taken.Load() {
			s.killWorker(w, why)
			return
		}
	}
	s.workerDead(w, why)
}

// killWorker ends a worker that may still write into slots. Death is confirmed by
// its pidfd; until then its slots stay where they are.
//
// In test/model: Kill; what follows the death is WorkerDead.
func (s *Stage) killWorker(w *WorkerSession, why string) {
	if w.state == workerQuarantined || w.state == workerAwaited {
		return
	}
	err := s.loop.outside.Kill(w.Peer)
	switch {
	case err == nil:
		s.log.Warn("worker killed", "worker", w.Label(), "pid", w.Pid, "why", why)
		w.moveTo(workerDying)
		s.batcher.WorkerGone(w.id)
	case w.faults.has(hungUp) && !w.faults.has(outlivedLease):
		// The end of its connection may be the first that we see of its death:
		// the kernel closes a process's descriptors before it says that the
		// process has ended. Death decides, and it is not far off if it is one.
		w.moveTo(workerAwaited)
		w.deathDue = s.loop.now + int64(deathTime)
		s.leaseEnd = min(s.leaseEnd, w.deathDue)
		s.batcher.WorkerGone(w.id)
		s.log.Warn("worker hung up with a batch and may not be killed; waiting for its end",
			"worker", w.Label(), "pid", w.Pid, "why", why, "error", err)
	default:
		s.quarantineWorker(w, why+": "+err.Error())
	}
}

// deathTime is how long the end of a process may come after the end of its
// connection. A large core dump or address space is taken down before that
// connection is, but the machine may be busy.
const deathTime = 5 * time.Second

// quarantineWorker gives up on a worker that may still write and cannot be killed:
// its requests end, their slots stay as they are until it is done or dead.
func (s *Stage) quarantineWorker(w *WorkerSession, why string) {
	s.log.Error("worker cannot be killed; its slots are quarantined", "worker", w.Label(), "pid", w.Pid, "why", why)
	w.moveTo(workerQuarantined)
	s.batcher.WorkerGone(w.id)
	for _, p := range w.mails {
		for _, q := range p.requests {
			if s.ring.stillHas(q, p.batch) && s.ring.slot(q.head).state == running {
				s.batcher.Ended(batcher.RequestID(q.head))
				s.ring.endRunningRequest(q.head, status.ErrWorkerHung)
			}
		}
	}
}

// endRunningOf releases a client that left from what workers have of it. It
// looks at running requests, which are fewer than the slots of a large window.
func (s *Stage) endRunningOf(c *ClientSession) {
	if c.busy == 0 {
		return
	}
	for _, w := range s.busy {
		for _, p := range w.mails {
			for _, q := range p.requests {
				if s.runsFor(c, q, p.batch) {
					s.ring.followBoard(q.head) // the client may have the answer already
				}
				if s.runsFor(c, q, p.batch) {
					s.ring.endRunningRequest(q.head, status.ErrCanceled)
				}
			}
		}
	}
}

// runsFor reports whether a mailed request runs for this client.
func (s *Stage) runsFor(c *ClientSession, q mailed, batch uint64) bool {
	info := s.ring.slot(q.head)
	return info.client == c && info.state == running && s.ring.stillHas(q, batch)
}

// maxHangs is how many workers a request may hang. Each costs its caller a
// whole lease: the second hears of it, whatever max_attempts says.
const maxHangs = 2

const hungReason = "it outlived its lease"

// isDoneAtLast says that a worker that was given up, and lives, has no batches any more.
func (w *WorkerSession) isDoneAtLast() bool {
	return (w.state == workerQuarantined || w.state == workerAwaited) && len(w.mails) == 0
}

// takeBackWorker takes a worker back that finished after all, unless it has left
// meanwhile.
func (s *Stage) takeBackWorker(w *WorkerSession) {
	if !w.isDoneAtLast() {
		return
	}
	s.touch()
	if w.faults.has(hungUp) {
		s.workerDead(w, "it finished and hung up")
		return
	}
	if w.resumeAt > 0 {
		w.moveTo(workerSuspended)
	} else {
		w.moveTo(workerServing)
	}
	s.log.Warn("worker is back from quarantine", "worker", w.Label(), "pid", w.Pid)
	s.describeWorker(w)
}

// workerDied is called when the kernel says that the process is dead.
func (s *Stage) workerDied(w *WorkerSession) {
	if w.state != workerGone {
		s.workerDead(w, "its process ended")
	}
}

// workerDead takes everything back from a worker that can no longer write.
// A batch it had taken may be what killed it: its requests are tried again
// one by one, so that a poisonous one fails alone.
func (s *Stage) workerDead(w *WorkerSession, why string) {
	s.touch()
	if w.state != workerDying {
		w.moveTo(workerDying)
	}
	s.drainDone(w)
	taken := w.box.Taken.Load()
	w.moveTo(workerGone)
	s.batcher.WorkerGone(w.id)
	requeued, withBatch := 0, len(w.mails) > 0 && w.mails[0].number < taken
	for _, p := range w.mails {
		for _, q := range p.requests {
			requeued += s.settleOrphan(q, p, p.number < taken, w.faults.has(outlivedLease) && p.batch == w.hungWith)
		}
	}
	s.setMails(w, nil)
	s.workers[w.id] = nil
	if s.present--; s.present == 0 {
		s.vacant = s.loop.now
		s.staffed.Store(false)
	}
	replace := s.loop.outside.WorkerLeft(w.Pid, withBatch, s.present == 0)
	w.closeSession(s.loop)
	s.stats.lost++
	if w.Name != "" {
		s.stats.countDeath(w.Name)
	}
	s.noteWorker("worker left", w)
	s.log.Info("worker left", "worker", w.Label(), "id", w.id, "pid", w.Pid, "why", why, "requeued", requeued)
	if replace {
		s.promoteSpare(w)
	}
	s.ring.dropUnusedDevice()
	s.ring.vacated()
}

// promoteSpare lets a spare, if there is one, take the place of a worker that was
// lost.
func (s *Stage) promoteSpare(lost *WorkerSession) {
	for _, w := range s.workers {
		if w != nil && w.state == workerSpare {
			w.moveTo(workerServing)
			s.describeWorker(w)
			s.loop.outside.Promoted(w.Pid, lost.Pid)
			s.log.Info("a spare takes its place", "worker", w.Label(), "id", w.id, "pid", w.Pid)
			return
		}
	}
}

// settleOrphan decides about one request of a dead worker's batch: answered before
// the death, tried once more, or given up. hung: the batch has outlived its lease.
// It returns 1 if it was requeued.
//
// In test/model: Orphan.
func (s *Stage) settleOrphan(q mailed, p *mail, taken, hung bool) int {
	info := s.ring.slot(q.head)
	if !s.ring.stillHas(q, p.batch) {
		return 0
	}
	id := batcher.RequestID(q.head)
	if info.state == held {
		s.batcher.Ended(id)
		s.ring.reclaimRequest(q.head)
		return 0
	}
	if w := s.ring.board.Word(q.head); w.Generation() == q.gen {
		s.batcher.Ended(id)
		s.countAnswered(info, w.Status())
		// The worker may have died between the answer and the ring.
		s.ring.board.Ring(info.client.first)
		s.ring.freeRequest(q.head)
		return 0
	}
	t := s.ring.troubleOf(q.head)
	if taken {
		t.attempts++
		t.share, t.by = 1, nil
	}
	if hung {
		t.hangs++
	}
	if t.attempts >= s.settings.MaxAttempts || t.hangs >= maxHangs || (taken && info.worker.info.RunOnce) {
		reason := fmt.Sprintf("%d workers died running this request", t.attempts)
		if t.hangs >= maxHangs {
			reason = fmt.Sprintf("%d workers were killed because they had this request for longer than the lease, %v", t.hangs, s.settings.Lease)
		}
		s.batcher.Ended(id)
		s.ring.endRequest(q.head, status.ErrWorkerDied, reason, false)
		s.ring.freeRequest(q.head)
		return 0
	}
	s.stats.requeued++
	s.requeueRequest(q.head)
	return 1
}
