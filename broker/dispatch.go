package broker

import (
	"github.com/ringbatch/ringbatch/broker/batcher"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
)

// decide asks the batcher what to do now and does it.
func (s *stage) decide() {
	for {
		s.catchUp()
		s.expireRunning()
		d := s.batcher.Decide(batcher.Time(s.loop.now))
		for i := range d.Ended {
			s.endQueued(&d.Ended[i])
		}
		for i := range d.Dispatches {
			s.dispatch(&d.Dispatches[i])
		}
		s.wake = int64(d.Wake)
		if !s.armDone() {
			break
		}
		s.loop.now = s.loop.clock()
	}
	s.batcher.Learn(batcher.Time(s.loop.now))
	s.settled()
}

func (s *stage) endQueued(e *batcher.End) {
	code := status.ErrExpired
	if e.Why == batcher.TimedOut {
		code = status.ErrQueueTimeout
	}
	s.ring.end(uint32(e.ID), code, "", false)
	s.ring.free(uint32(e.ID))
}

// dispatch posts a batch to its worker: slot indices, never bytes.
func (s *stage) dispatch(d *batcher.Dispatch) {
	w, now := s.workers[d.Worker], s.loop.now
	mail, reqs := w.box.At(w.posted)
	*mail = shm.Mail{Batch: uint64(d.Batch), Dispatched: now, Requests: uint32(len(d.Requests)), Rows: uint32(d.Rows), PadTo: uint32(d.PadTo), Dims: d.Dims}
	p := w.newMail()
	p.batch, p.number, p.posted = uint64(d.Batch), w.posted, now
	if s.settings.Ragged {
		for _, id := range d.Requests {
			for i, n := range s.ring.slots[id].commit.Dims {
				mail.Dims[i] = max(mail.Dims[i], n)
			}
		}
	}
	for i, id := range d.Requests {
		head := uint32(id)
		info := &s.ring.slots[head]
		s.ring.setState(head, running)
		info.worker, info.batch, info.dispatched = w, uint64(d.Batch), now
		reqs[i] = shm.MailRequest{
			Slot: head, Gen: info.gen, Rows: info.commit.Rows, Bell: info.client.first,
			Deadline: info.commit.Deadline, Committed: info.commit.Committed, Dims: info.commit.Dims,
		}
		p.requests = append(p.requests, mailed{head, info.gen})
		if info.commit.Deadline > 0 {
			s.runningDeadline = min(s.runningDeadline, info.commit.Deadline)
		}
	}
	if len(w.mails) == 0 {
		w.running = now
		s.leaseEnd = min(s.leaseEnd, now+int64(s.settings.Lease))
	}
	s.setMails(w, append(w.mails, p))
	s.stats.dispatched(d)
	w.box.Post(w.posted)
	w.posted++
}

// armDone asks busy workers to ring when they are done, but only if somebody
// waits for that; otherwise the next commit finds their message in time, and
// a lone request costs one wake-up less. True if something came in meanwhile.
func (s *stage) armDone() bool {
	if s.batcher.Queued() == 0 && !s.loop.draining && s.ring.held == 0 {
		return false
	}
	more := false
	for _, w := range s.busy {
		if !w.broken && !w.done.Arm() {
			more = true
		}
	}
	return more
}

// expireRunning releases the callers of running requests whose deadline has
// passed. runningDeadline is never later than the earliest of them, so the
// search is rare.
func (s *stage) expireRunning() {
	now := s.loop.now
	if now < s.runningDeadline {
		return
	}
	s.runningDeadline = never
	for _, w := range s.busy {
		for _, p := range w.mails {
			for _, q := range p.requests {
				info := &s.ring.slots[q.head]
				if !s.ring.has(q, p.batch) || info.state != running || info.commit.Deadline == 0 {
					continue
				}
				if info.commit.Deadline <= now {
					s.ring.endRunning(q.head, status.ErrExpired)
				} else {
					s.runningDeadline = min(s.runningDeadline, info.commit.Deadline)
				}
			}
		}
	}
}

// checkLeases kills the workers whose running batch takes for too long.
// leaseEnd is never later than the earliest end of a lease, so it is rarely
// asked for.
func (s *stage) checkLeases() {
	if s.loop.now < s.leaseEnd {
		return
	}
	s.leaseEnd = never
	for i := len(s.busy) - 1; i >= 0; i-- { // from behind: drainDone takes w out
		w := s.busy[i]
		if w.dying || w.quarantined {
			continue
		}
		if s.loop.now >= w.running+int64(s.settings.Lease) {
			if s.drainDone(w); len(w.mails) > 0 && s.loop.now >= w.running+int64(s.settings.Lease) {
				s.stats.hung++
				w.hung = true
				s.kill(w, hungReason)
				continue
			}
		}
		if len(w.mails) > 0 {
			s.leaseEnd = min(s.leaseEnd, w.running+int64(s.settings.Lease))
		}
	}
}
