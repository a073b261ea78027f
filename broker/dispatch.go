package broker

import (
	"github.com/ringbatch/ringbatch/broker/batcher"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
)

// touch marks the model for a decision at the end of this round of the loop.
func (m *model) touch() {
	if !m.dirty {
		m.dirty = true
		m.b.dirty = append(m.b.dirty, m)
	}
}

// decide asks the batcher what to do now and does it.
func (m *model) decide() {
	m.dirty = false
	for {
		m.drainAllDone()
		m.expireRunning()
		d := m.batcher.Decide(batcher.Time(m.b.now))
		for i := range d.Ended {
			m.endQueued(&d.Ended[i])
		}
		for i := range d.Dispatches {
			m.dispatch(&d.Dispatches[i])
		}
		m.wake = int64(d.Wake)
		if !m.armDone() {
			return
		}
		m.b.now = m.b.clock()
	}
}

func (m *model) endQueued(e *batcher.End) {
	s := status.ErrExpired
	if e.Why == batcher.TimedOut {
		s = status.ErrQueueTimeout
	}
	m.end(uint32(e.ID), s, "", false)
	m.free(uint32(e.ID))
}

// dispatch posts a batch to its worker: slot indices, never bytes.
func (m *model) dispatch(d *batcher.Dispatch) {
	w := m.workers[d.Worker]
	mail, reqs := w.box.At(w.posted)
	*mail = shm.Mail{Batch: uint64(d.Batch), Dispatched: m.b.now, Requests: uint32(len(d.Requests)), Rows: uint32(d.Rows), PadTo: uint32(d.PadTo), Dims: d.Dims}
	p := w.newMail()
	if m.cfg.Ragged {
		for _, id := range d.Requests {
			for i, n := range m.slots[id].commit.Dims {
				mail.Dims[i] = max(mail.Dims[i], n)
			}
		}
	}
	p.batch, p.number, p.posted = uint64(d.Batch), w.posted, m.b.now
	for i, id := range d.Requests {
		head := uint32(id)
		info := &m.slots[head]
		m.setState(head, running)
		info.worker, info.batch, info.dispatched = w, uint64(d.Batch), m.b.now
		reqs[i] = shm.MailRequest{
			Slot: head, Gen: info.gen, Rows: info.commit.Rows, Bell: info.client.first,
			Deadline: info.commit.Deadline, Committed: info.commit.Committed, Dims: info.commit.Dims,
		}
		p.requests = append(p.requests, mailed{head, info.gen})
		if info.commit.Deadline > 0 {
			m.runningDeadline = min(m.runningDeadline, info.commit.Deadline)
		}
	}
	w.mails = append(w.mails, p)
	if len(w.mails) == 1 {
		w.running = m.b.now
	}
	m.stats.dispatched(d)
	w.box.Post(w.posted)
	w.posted++
}

// armDone asks busy workers to ring when they are done, but only if somebody
// waits for that; otherwise the next commit finds their message in time, and
// a lone request costs one wake-up less. True if something came in meanwhile.
func (m *model) armDone() bool {
	if m.batcher.Queued() == 0 && !m.b.draining && m.held == 0 {
		return false
	}
	more := false
	for _, w := range m.workers {
		if w != nil && len(w.mails) > 0 && !w.broken && !w.done.Arm() {
			more = true
		}
	}
	return more
}

// expireRunning releases the callers of running requests whose deadline has
// passed. runningDeadline is never later than the earliest of them, so the
// search is rare.
func (m *model) expireRunning() {
	if m.b.now < m.runningDeadline {
		return
	}
	m.runningDeadline = never
	for _, w := range m.workers {
		if w == nil {
			continue
		}
		for _, p := range w.mails {
			for _, q := range p.requests {
				info := &m.slots[q.head]
				if !m.has(q, p.batch) || info.state != running || info.commit.Deadline == 0 {
					continue
				}
				if info.commit.Deadline <= m.b.now {
					m.endRunning(q.head, status.ErrExpired)
				} else {
					m.runningDeadline = min(m.runningDeadline, info.commit.Deadline)
				}
			}
		}
	}
}

// nextTimer is when this model needs the loop even if nothing happens.
func (m *model) nextTimer() int64 {
	t := min(m.wake, m.runningDeadline)
	for _, w := range m.workers {
		if w != nil && len(w.mails) > 0 && !w.dying && !w.quarantined {
			t = min(t, w.running+int64(m.cfg.Lease))
		}
	}
	return t
}
