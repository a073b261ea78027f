// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"time"

	"github.com/ringbatch/ringbatch/broker/batcher"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
)

// A stage's decisions: batches go out, and overdue requests and leases end.

// decide carries out the batcher's decision. If workers have finished batches meanwhile
// for which requests wait, the stage decides again in this round.
func (s *Stage) decide() {
	s.expireRunning()
	s.resumeSuspended()
	d := s.batcher.Decide(batcher.Time(s.loop.now))
	for i := range d.Ended {
		s.endQueuedRequest(&d.Ended[i])
	}
	for i := range d.Dispatches {
		s.dispatchBatch(&d.Dispatches[i])
	}
	s.wake = int64(d.Wake)
	if s.armDone() {
		s.loop.now = s.loop.clock()
		s.loop.dirty = append(s.loop.dirty, s)
		return
	}
	s.loop.work.Decisions++
	s.batcher.Learn(batcher.Time(s.loop.now))
	s.updateLoop()
}

func (s *Stage) endQueuedRequest(e *batcher.End) {
	code := status.ErrExpired
	reason := ""
	switch {
	case e.Why == batcher.TimedOut:
		code = status.ErrQueueTimeout
	case s.present == 0:
		reason = s.whyNoWorker()
	}
	s.ring.settle(uint32(e.ID), ended, ending{code: code, reason: reason})
}

// dispatchBatch posts a batch to its worker: slot indices, never bytes.
func (s *Stage) dispatchBatch(d *batcher.Dispatch) {
	w, now := s.workers[d.Worker], s.loop.now
	mail, reqs := w.box.At(w.posted)
	*mail = shm.Mail{
		Batch: uint64(d.Batch), Dispatched: now, Requests: uint32(len(d.Requests)),
		Rows: uint32(d.Rows), PadTo: uint32(d.PadTo), Dims: d.Dims,
	}
	p := w.newMail()
	p.batch, p.number, p.posted, p.begun, p.rows, p.forgiven = uint64(d.Batch), w.posted, now, now, uint32(d.Rows), false
	if s.settings.Ragged {
		for _, id := range d.Requests {
			for i, n := range s.sizesOf(s.ring.slot(uint32(id))) {
				mail.Dims[i] = max(mail.Dims[i], n)
			}
		}
	}
	mail.Level = uint32(s.settings.LevelCount() - 1)
	for i, id := range d.Requests {
		head := uint32(id)
		info := s.ring.slot(head)
		mail.Level = min(mail.Level, uint32(s.levelOf(&info.commit)))
		s.ring.setSlots(head, running)
		info.worker, info.batch, info.dispatched = w, uint64(d.Batch), now
		reqs[i] = shm.MailRequest{
			Slot: head, Gen: info.gen, Rows: info.commit.Rows, Bell: info.client.first,
			Deadline: info.commit.Deadline, Committed: info.commit.Committed, Dims: s.sizesOf(info),
		}
		p.requests = append(p.requests, mailed{head, info.gen})
		if !info.client.isAttached() { // partWithClient has not come to it yet
			s.ring.settle(head, endedEarly, ending{code: status.ErrCanceled})
			continue
		}
		if info.commit.Deadline > 0 {
			s.runningDeadline = min(s.runningDeadline, info.commit.Deadline)
		}
	}
	s.leaseEnd = min(s.leaseEnd, now+int64(s.settings.Lease))
	s.setMails(w, append(w.mails, p))
	s.stats.countBatch(d)
	w.box.Post(w.posted)
	w.posted++
}

// levelOf is the priority level of a commit. The policy may have fewer levels by now.
func (s *Stage) levelOf(e *shm.Commit) int {
	if e.Level < 0 {
		return s.settings.DefaultPriority
	}
	return min(int(e.Level), s.settings.LevelCount()-1)
}

// armDone asks busy workers to ring when they are done, if a request waits for that in
// this stage or goes on to the next. Otherwise the next commit finds the message, and a
// lone request costs one wake-up less. It returns true if a worker was done meanwhile.
func (s *Stage) armDone() bool {
	if s.next == nil && s.batcher.Queued() == 0 && !s.loop.draining && s.ring.held == 0 {
		return false
	}
	more := false
	for _, w := range s.busy {
		if !w.faults.has(brokeProtocol) && !w.done.Arm() {
			more = true
		}
	}
	return more
}

// expireRunning ends overdue requests. It searches only from runningDeadline on.
func (s *Stage) expireRunning() {
	now := s.loop.now
	if now < s.runningDeadline {
		return
	}
	s.runningDeadline = never
	for info := range s.ring.runningOn(s.busy...) {
		switch due := info.commit.Deadline; {
		case due == 0:
		case due <= now:
			s.ring.settle(info.head, endedEarly, ending{code: status.ErrExpired})
		default:
			s.runningDeadline = min(s.runningDeadline, due)
		}
	}
}

// leaseOf is when the lease of a worker's oldest batch ends. It counts from the dispatch,
// or from the end of the previous batch if that is later, since a worker may run batches
// one after the other. Later batches do not matter: a worker that runs several at once
// must not hide a hanging batch behind them.
func (s *Stage) leaseOf(w *WorkerSession) int64 { return w.mails[0].begun + int64(s.settings.Lease) }

// mostLate is how late a broker that can run comes to the end of a lease at most.
const mostLate = 50 * time.Millisecond

// forgiveStandstill gives workers their time once more after the broker, or the whole
// machine, stood still when a lease ended. Each batch is forgiven once, so a hung worker
// is killed after two leases at the latest.
func (s *Stage) forgiveStandstill() {
	now := s.loop.now
	s.catchUp() // batches that ended before the standstill do not run now
	for _, w := range s.busy {
		if oldest := w.mails[0]; now >= s.leaseOf(w) && !oldest.forgiven {
			oldest.begun, oldest.forgiven = now, true
		}
		if w.state == workerAwaited && now >= w.deathDue && !w.forgiven {
			w.deathDue, w.forgiven = now+int64(deathTime), true
		}
	}
}

// endOverdueLeases kills workers whose oldest batch has outlived its lease, and
// quarantines awaited workers that live. It searches only from leaseEnd on.
func (s *Stage) endOverdueLeases() {
	now := s.loop.now
	if now < s.leaseEnd {
		return
	}
	if now-s.leaseEnd > int64(mostLate) {
		s.forgiveStandstill()
	}
	s.leaseEnd = never
	for i := len(s.busy) - 1; i >= 0; i-- { // backwards, since drainDone may remove a worker
		s.endOverdueLease(s.busy[i])
	}
}

func (s *Stage) endOverdueLease(w *WorkerSession) {
	due := s.overdueAt(w)
	if s.loop.now >= due {
		s.drainDone(w)
		due = s.overdueAt(w)
	}
	switch {
	case s.loop.now < due:
		s.leaseEnd = min(s.leaseEnd, due)
	case w.state == workerAwaited:
		s.quarantineWorker(w, "it hung up with a batch, and its process lives")
	default:
		s.stats.hung++
		w.faults |= outlivedLease
		w.hungWith = w.mails[0].batch
		s.killWorker(w, "it outlived its lease")
	}
}

// overdueAt is when endOverdueLease has to act on a worker.
func (s *Stage) overdueAt(w *WorkerSession) int64 {
	switch {
	case len(w.mails) == 0 || w.faults.has(brokeProtocol):
		return never
	case w.state == workerAwaited:
		return w.deathDue
	case w.state.isGivenUp():
		return never
	}
	return s.leaseOf(w)
}
