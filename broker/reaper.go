package broker

import (
	"fmt"

	"github.com/ringbatch/ringbatch/broker/batcher"
	"github.com/ringbatch/ringbatch/status"
)

// clientLeft cleans up after a client that closed, died, or was thrown out.
// What it had queued is canceled; what runs keeps its slots until the worker
// is through; then the window returns.
func (m *model) clientLeft(c *clientSession, why string) {
	if c.left {
		return
	}
	m.touch()
	m.drainAllDone() // what they answered before it left counts
	for _, id := range m.batcher.ClientLeft(batcher.ClientID(c.first)) {
		m.stats.ended(status.ErrCanceled)
		m.free(uint32(id))
	}
	for s := c.first; s < c.first+uint32(c.window); s++ {
		if m.slots[s].state == running && m.slots[s].head == s {
			m.endRunning(s, status.ErrCanceled)
		}
	}
	c.left = true
	delete(m.clients, c)
	c.close(m.b)
	m.log.Debug("client left", "client", c.label(), "pid", c.pid, "why", why)
	if c.busy == 0 {
		m.returnWindow(c)
	}
}

func (m *model) returnWindow(c *clientSession) {
	m.windows.giveBack(c.first, c.window)
	m.log.Debug("window returned", "client", c.label(), "pid", c.pid, "window", c.window)
	m.b.maybeForget(m)
}

// workerLost handles the end of a worker's connection.
func (m *model) workerLost(w *workerSession, why string) {
	w.hungUp = true
	if !w.gone {
		m.touch()
		m.drainDone(w) // what it finished before it left
		m.evict(w, why)
	}
}

// evict parts with a worker whose connection is of no more use. Batches that
// it never took simply go to others. If it took some, it may still be
// writing: then it must be dead before their slots are used again.
func (m *model) evict(w *workerSession, why string) {
	if w.gone || w.dying {
		return
	}
	for _, p := range w.mails {
		if w.broken || p.number < w.box.Taken.Load() {
			m.kill(w, why)
			return
		}
	}
	m.workerDead(w, why)
}

// kill ends a worker that may still write into slots. Death is confirmed by
// its pidfd; until then its slots stay where they are.
//
// In docs/model: Kill; what follows the death is WorkerDead.
func (m *model) kill(w *workerSession, why string) {
	err := m.b.killPeer(w.peer)
	if err == nil {
		m.log.Warn("worker killed", "worker", w.label(), "pid", w.pid, "why", why)
		w.dying = true
		m.batcher.WorkerGone(w.id)
		return
	}
	if w.quarantined {
		return
	}
	m.log.Error("worker cannot be killed; its slots are quarantined", "worker", w.label(), "pid", w.pid, "why", why, "error", err)
	w.quarantined = true
	m.batcher.WorkerGone(w.id)
	for _, p := range w.mails {
		for _, q := range p.requests {
			if m.has(q, p.batch) && m.slots[q.head].state == running {
				m.batcher.Ended(batcher.RequestID(q.head))
				m.endRunning(q.head, status.ErrWorkerHung)
			}
		}
	}
}

const hungReason = "it outlived its lease"

// recover takes a quarantined worker back that finished after all, unless it
// has left meanwhile.
func (m *model) recover(w *workerSession) {
	w.quarantined = false
	if w.hungUp {
		m.workerDead(w, "it finished and hung up")
		return
	}
	m.log.Warn("worker is back from quarantine", "worker", w.label(), "pid", w.pid)
	m.batcher.WorkerReady(w.desc)
}

// workerDied is called when the kernel says that the process is dead.
func (m *model) workerDied(w *workerSession) {
	if !w.gone {
		m.workerDead(w, "its process ended")
	}
}

// workerDead takes everything back from a worker that can no longer write.
// A batch it had taken may be what killed it: its requests are tried again
// one by one, so that a poisonous one fails alone.
func (m *model) workerDead(w *workerSession, why string) {
	m.touch()
	w.dying = true // no protocol errors any more
	m.drainDone(w)
	taken := w.box.Taken.Load()
	w.gone = true
	m.batcher.WorkerGone(w.id)
	requeued := 0
	m.b.super.Left(w.pid, len(w.mails) > 0 && w.mails[0].number < taken)
	for _, p := range w.mails {
		for _, q := range p.requests {
			requeued += m.orphan(q, p, p.number < taken)
		}
	}
	w.mails = nil
	m.workers[w.id] = nil
	if m.workerCount() == 0 {
		m.b.changes.note()
	}
	w.close(m.b)
	m.stats.lost++
	if w.name != "" {
		m.stats.deaths[w.name]++
	}
	m.log.Info("worker left", "worker", w.label(), "id", w.id, "pid", w.pid, "why", why, "requeued", requeued)
	m.b.maybeForget(m)
}

// orphan decides about one request of a dead worker's batch: answered before
// the death, tried once more, or given up. It returns 1 if it was requeued.
//
// In docs/model: Orphan.
func (m *model) orphan(q mailed, p *mail, taken bool) int {
	info := &m.slots[q.head]
	if !m.has(q, p.batch) {
		return 0
	}
	id := batcher.RequestID(q.head)
	if info.state == held {
		m.batcher.Ended(id)
		m.reclaim(q.head)
		return 0
	}
	if w := m.board.Word(q.head); w.Generation() == q.gen {
		m.batcher.Ended(id)
		m.stats.ended(w.Status())
		// The worker may have died between the answer and the ring.
		m.board.Ring(info.client.first)
		m.free(q.head)
		return 0
	}
	if taken {
		info.attempts++
	}
	if info.attempts >= maxAttempts {
		m.batcher.Ended(id)
		m.end(q.head, status.ErrWorkerDied, fmt.Sprintf("%d workers died running this request", info.attempts), false)
		m.free(q.head)
		return 0
	}
	m.stats.requeued++
	m.setState(q.head, queued)
	info.worker = nil
	m.batcher.Requeue(batcher.Time(m.b.now), m.request(q.head))
	return 1
}

// checkLeases kills the workers whose running batch takes for too long.
func (m *model) checkLeases() {
	for _, w := range m.workers {
		if w == nil || w.dying || w.quarantined || len(w.mails) == 0 {
			continue
		}
		if m.b.now >= w.running+int64(m.cfg.Lease) {
			if m.drainDone(w); len(w.mails) > 0 && m.b.now >= w.running+int64(m.cfg.Lease) {
				m.stats.hung++
				m.kill(w, hungReason)
			}
		}
	}
}
