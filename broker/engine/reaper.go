// SPDX-License-Identifier: Apache-2.0

package engine

import (
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
	for info := range s.ring.runningOn(w) {
		s.batcher.Ended(batcher.RequestID(info.head), batcher.Never)
		s.ring.settle(info.head, endedEarly, ending{code: status.ErrWorkerHung})
	}
}

// endRunningOf ends the running requests of a client that leaves. It searches the
// workers' batches, which are fewer than the slots of a large window.
func (s *Stage) endRunningOf(c *ClientSession) {
	if c.busy == 0 {
		return
	}
	for info := range s.ring.runningOn(s.busy...) {
		if info.client == c {
			s.ring.settleAnswered(info.head) // the client may have the answer already
		}
		if info.client == c {
			s.ring.settle(info.head, endedEarly, ending{code: status.ErrCanceled})
		}
	}
}

// maxHangs is how many workers a request may hang. Each costs the caller a whole lease.
const maxHangs = 2

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
	var with []*ClientSession
	for _, p := range w.mails {
		if p.number < taken {
			with = s.clientsOf(p, with)
		}
	}
	s.blame(with)
	for _, p := range w.mails {
		lost := s.newFailure(w, p)
		lost.died, lost.taken = true, p.number < taken
		lost.price += batcher.Time(s.startTook) / batcher.Time(len(p.requests))
		for _, q := range p.requests {
			if s.ring.stillHas(q, p.batch) && s.settleOrphan(s.ring.slot(q.head), p, lost) {
				requeued++
			}
		}
	}
	if withBatch && s.lostAt == 0 {
		s.lostAt = s.loop.now
	}
	s.setMails(w, nil)
	s.workers[w.id] = nil
	if s.present--; s.present == 0 {
		s.vacant = s.loop.now
		s.staffed.Store(false)
		s.wantWorkers() // the worker may have been another program's
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

// settleOrphan settles a request of a dead worker, unless it runs again.
func (s *Stage) settleOrphan(info *slotInfo, p *mail, lost *failure) (again bool) {
	why, e := orphaned, ending{code: status.ErrWorkerDied}
	if info.state == running && s.ring.board.Word(info.head).Generation() != info.gen {
		if why, e.reason = ended, s.retryRequest(info, p, lost); e.reason == "" {
			return true
		}
	}
	if info.state == held {
		s.chargeEnded(info.client, lost)
	}
	s.ring.settle(info.head, why, e)
	return false
}
