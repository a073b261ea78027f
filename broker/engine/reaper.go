// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"fmt"
	"time"

	"github.com/ringbatch/ringbatch/broker/batcher"
	"github.com/ringbatch/ringbatch/status"
)

// The end of workers that die, hang, leave, or break the protocol.

func (s *Stage) workerLost(w *WorkerSession, why string) {
	w.faults |= hungUp
	if w.state != workerGone {
		s.touch()
		s.drainDone(w) // batches from before it left count
		s.evictWorker(w, why)
	}
}

func (s *Stage) disconnectWorker(w *WorkerSession, err error) {
	s.log.Warn("worker disconnected: it broke the protocol", "worker", w.Label(), "pid", w.Pid, "reason", err)
	s.touch()
	s.stats.offenders++
	s.loop.outside.Offended(w.Process)
	s.evictWorker(w, "it broke the protocol")
}

// evictWorker parts with a worker whose connection is of no more use. Batches that it
// never took go to others. If it took some, it may still be writing, so it must be dead
// before their slots are used again.
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

// killWorker ends a worker that may still write into slots. Its slots stay until its
// pidfd reports its death.
//
// In test/model: Kill, and WorkerDead after the death.
func (s *Stage) killWorker(w *WorkerSession, why string) {
	if w.state == workerQuarantined || w.state == workerAwaited {
		return
	}
	left := w.faults.has(hungUp) && !w.faults.has(outlivedLease) // the kernel hangs up for a process that ends
	err := s.loop.outside.Kill(w.Peer, left)
	switch {
	case err == nil:
		said := "worker killed"
		if left {
			said, why = "worker lost with a batch", "its process has ended, or hung up and is killed now"
		}
		s.log.Warn(said, "worker", w.Label(), "pid", w.Pid, "why", why)
		w.moveTo(workerDying)
		s.batcher.WorkerGone(w.id)
	case left:
		// The kernel closes a process's descriptors before it reports the death. So the
		// worker may be dying, and the broker waits for that report.
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

// deathTime is the longest time between the end of a connection and the report of its
// process's death. The kernel writes core dumps and frees address spaces before it
// closes the connection, but the machine may be busy.
const deathTime = 5 * time.Second

// quarantineWorker gives up a worker that may still write and cannot be killed. Its
// requests end, and their slots stay held until it is done or dead.
func (s *Stage) quarantineWorker(w *WorkerSession, why string) {
	s.log.Error("worker cannot be killed; its slots are quarantined", "worker", w.Label(), "pid", w.Pid, "why", why)
	w.moveTo(workerQuarantined)
	s.batcher.WorkerGone(w.id)
	for _, p := range w.mails {
		for _, q := range p.requests {
			if s.ring.stillHas(q, p.batch) && s.ring.slot(q.head).state == running {
				s.batcher.Ended(batcher.RequestID(q.head), batcher.Never)
				s.ring.endRunningRequest(q.head, status.ErrWorkerHung)
			}
		}
	}
}

// endRunningOf ends the running requests of a client that leaves. It searches the
// workers' batches, which are fewer than the slots of a large window.
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

func (s *Stage) runsFor(c *ClientSession, q mailed, batch uint64) bool {
	info := s.ring.slot(q.head)
	return info.client == c && info.state == running && s.ring.stillHas(q, batch)
}

// maxHangs is how many workers a request may hang. Each costs the caller a whole lease.
const maxHangs = 2

const hungReason = "it outlived its lease"

// isDoneAtLast says that a worker that was given up, and lives, has finished its batches.
func (w *WorkerSession) isDoneAtLast() bool {
	return (w.state == workerQuarantined || w.state == workerAwaited) && len(w.mails) == 0
}

// takeBackWorker lets a worker that has finished after all serve again, unless it left.
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

// workerDied is called when the kernel reports the death of the process.
func (s *Stage) workerDied(w *WorkerSession) {
	if w.state != workerGone {
		s.workerDead(w, "its process ended")
	}
}

// workerDead takes all batches back from a worker that can no longer write. A batch that
// the worker had taken may have killed it. So its requests are tried again one by one,
// and a poisonous request fails alone.
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
	s.ring.sessionEnded()
}

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

// settleOrphan decides about one request of a dead worker's batch: it was answered before
// the death, is tried once more, or fails. hung says that the batch outlived its lease.
// It returns 1 if it requeued the request.
//
// In test/model: Orphan.
func (s *Stage) settleOrphan(q mailed, p *mail, taken, hung bool) int {
	info := s.ring.slot(q.head)
	if !s.ring.stillHas(q, p.batch) {
		return 0
	}
	id := batcher.RequestID(q.head)
	if info.state == held {
		s.batcher.Ended(id, batcher.Never)
		s.ring.reclaimRequest(q.head)
		return 0
	}
	if w := s.ring.board.Word(q.head); w.Generation() == q.gen {
		s.batcher.Ended(id, batcher.Never)
		s.countAnswered(info, w.Status())
		// The worker may have died before it rang.
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
			reason = fmt.Sprintf("%d workers were killed because they had this request for longer than the lease, %v",
				t.hangs, s.settings.Lease)
		}
		s.batcher.Ended(id, batcher.Never)
		s.ring.endRequest(q.head, status.ErrWorkerDied, reason, false)
		s.ring.freeRequest(q.head)
		return 0
	}
	s.stats.requeued++
	s.requeueRequest(q.head)
	return 1
}
