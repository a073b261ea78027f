package broker

import (
	"fmt"
	"time"

	"github.com/ringbatch/ringbatch/broker/batcher"
	"github.com/ringbatch/ringbatch/internal/control"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
)

// workerSession is one attached worker.
type workerSession struct {
	*peer
	model  *model
	id     batcher.WorkerID
	info   control.WorkerInfo
	desc   batcher.Worker
	depth  int
	box    *shm.Mailbox
	done   shm.Consumer[shm.Done]
	posted uint64  // mails ever posted
	mails  []*mail // posted and not done, oldest first; at most depth
	spare  []*mail
	// running is since when the oldest mail has been the one that runs: the
	// lease counts from here.
	running     int64
	dying       bool // killed; its slots are safe once the kernel says it is dead
	quarantined bool // hung, and could not be killed
	broken      bool // wrote nonsense; its ring is not read any more
	hungUp      bool // its connection has ended
	gone        bool

	batches  uint64
	busy     time.Duration
	restarts int // workers of its name that had gone before it came
}

// mail is the broker's own copy of what it posted.
type mail struct {
	batch    uint64
	number   uint64
	posted   int64
	requests []mailed
}

type mailed struct{ head, gen uint32 }

func (w *workerSession) newMail() *mail {
	if n := len(w.spare); n > 0 {
		p := w.spare[n-1]
		w.spare = w.spare[:n-1]
		p.requests = p.requests[:0]
		return p
	}
	return &mail{}
}

// attachWorker makes the session of a worker whose signature was checked.
func (m *model) attachWorker(p *peer, info control.WorkerInfo) (*workerSession, error) {
	if info.Depth < 1 || info.Depth > shm.MaxMailDepth {
		return nil, fmt.Errorf("%w: depth %d, must be 1..%d", status.ErrInvalid, info.Depth, shm.MaxMailDepth)
	}
	desc := batcher.Worker{Weight: max(1, info.Weight), MaxInFlight: info.Depth, PadTo: info.PadTo}
	switch info.Pad {
	case "":
	case "fixed":
		desc.Pad = batcher.PadFixed
		if info.PadTo < m.layout.MaxBatch || info.PadTo > shm.MaxBatchRows {
			return nil, fmt.Errorf("%w: pad_to is %d, must be max_batch_size (%d) or more", status.ErrInvalid, info.PadTo, m.layout.MaxBatch)
		}
	case "preferred":
		desc.Pad = batcher.PadPreferred
	default:
		return nil, fmt.Errorf("%w: pad is %q, must be fixed or preferred", status.ErrInvalid, info.Pad)
	}
	if err := p.open(m, shm.KindWorker, shm.WorkerSegmentSize(info.Depth, m.layout.MaxBatch)); err != nil {
		return nil, err
	}
	w := &workerSession{peer: p, model: m, info: info, depth: info.Depth, restarts: m.stats.deaths[p.name]}
	w.box = shm.NewMailbox(p.seg, info.Depth, m.layout.MaxBatch)
	w.done = shm.NewConsumer(shm.DoneRing(p.seg, info.Depth))
	if err := p.listen(m.b, m.touch, func() { m.workerDied(w) }); err != nil {
		p.close(m.b)
		return nil, err
	}
	w.id = batcher.WorkerID(len(m.workers))
	for i, other := range m.workers {
		if other == nil {
			w.id = batcher.WorkerID(i)
			break
		}
	}
	if int(w.id) == len(m.workers) {
		m.workers = append(m.workers, nil)
	}
	m.workers[w.id] = w
	if m.workerCount() == 1 {
		m.b.changes.note()
	}
	desc.ID = w.id
	w.desc = desc
	m.batcher.WorkerReady(desc)
	m.stats.attached++
	m.b.super.Attached(w.pid)
	m.touch()
	m.log.Info("worker attached", "worker", w.label(), "id", w.id, "pid", w.pid, "gpu", info.GPU)
	return w, nil
}

func (m *model) workerCount() (n int) {
	for _, w := range m.workers {
		if w != nil {
			n++
		}
	}
	return n
}

// drainAllDone is drainDone for every worker that has a batch.
func (m *model) drainAllDone() {
	for _, w := range m.workers {
		if w != nil && len(w.mails) > 0 {
			m.drainDone(w)
		}
	}
}

// drainDone reads the worker's "done" messages. The worker may be gone after
// it.
//
// In docs/model: DrainDone, FinishRequest.
func (m *model) drainDone(w *workerSession) {
	if w.broken {
		return
	}
	n, err := w.done.Pending()
	if n == 0 && err == nil {
		return
	}
	for range n {
		var d shm.Done
		w.done.Take(&d)
		if err = m.finish(w, &d); err != nil {
			break
		}
	}
	w.done.Give()
	switch {
	case err != nil:
		m.log.Warn("worker disconnected: it broke the protocol", "worker", w.label(), "pid", w.pid, "reason", err)
		m.stats.offenders++
		m.b.offenders.add(w.pid)
		w.broken = true
		m.evict(w, "it broke the protocol")
	case w.quarantined && !w.dying && len(w.mails) == 0:
		m.recover(w)
	}
}

// finish takes one batch off a worker's hands.
func (m *model) finish(w *workerSession, d *shm.Done) error {
	for i, p := range w.mails {
		if p.batch != d.Batch {
			continue
		}
		w.mails = append(w.mails[:i], w.mails[i+1:]...)
		started := min(max(d.Started, p.posted), m.b.now)
		finished := min(max(d.Finished, started), m.b.now)
		for _, q := range p.requests {
			m.finishRequest(q, p.batch, started, finished)
		}
		w.running = finished
		w.batches++
		w.busy += time.Duration(finished - started)
		m.batcher.BatchDone(w.id, batcher.BatchID(p.batch))
		w.spare = append(w.spare, p)
		return nil
	}
	return fmt.Errorf("%w: done with batch %d, which it does not have", status.ErrProtocol, d.Batch)
}

// has reports whether a mailed request still is what its batch was given: it
// may have ended early, and its slots may be part of another request.
func (m *model) has(q mailed, batch uint64) bool {
	info := &m.slots[q.head]
	return info.head == q.head && info.gen == q.gen && info.batch == batch && (info.state == running || info.state == held)
}

// finishRequest frees the slots of one request of a finished batch, unless
// they have moved on already (see endedEarly).
func (m *model) finishRequest(q mailed, batch uint64, started, finished int64) {
	info := &m.slots[q.head]
	if !m.has(q, batch) {
		return
	}
	if info.worker.dying || info.worker.quarantined { // the batcher has forgotten which batches it had
		m.batcher.Ended(batcher.RequestID(q.head))
	}
	if info.state == held {
		m.reclaim(q.head)
		return
	}
	switch w := m.board.Word(q.head); {
	case w.Generation() != q.gen:
		// The worker says it is done but never answered: somebody must.
		m.end(q.head, status.ErrFailed, "the worker ended the batch without answering this request", false)
	default:
		m.stats.finished(info, w.Status(), started, finished)
	}
	m.free(q.head)
}

// reclaim gives the slots of a request that ended early back to its client.
func (m *model) reclaim(head uint32) {
	info := &m.slots[head]
	if !info.client.left {
		m.board.Reclaim(head, info.gen)
		m.board.Ring(info.client.first)
	}
	m.free(head)
}
