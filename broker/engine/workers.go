// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"fmt"
	"slices"
	"time"

	"github.com/ringbatch/ringbatch/broker/batcher"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
)

// WorkerInfo is how a worker describes itself.
type WorkerInfo struct {
	Depth   int // batches that it may hold
	Lanes   int // batches that it runs at once; 0 counts as 1
	Share   int
	Pad     string // "", "fixed", "preferred"
	PadTo   int
	GPU     string // where it computes, for statistics
	RunOnce bool   // its requests must not be run again
	Ragged  bool   // it can run batches that mix sizes
	Program string // what it computes; "any" goes with all
	Group   string // of processes that the broker replaces by each other; "": it did not start the process
}

// WorkerSession is one attached worker.
type WorkerSession struct {
	*Peer
	stage  *Stage
	id     batcher.WorkerID
	info   WorkerInfo
	desc   batcher.Worker
	box    *shm.Mailbox
	done   shm.Consumer[shm.Done]
	posted uint64  // mails ever posted
	mails  []*mail // posted and not done, oldest first; at most info.Depth; changed by setMails only
	at     int     // place in Stage.busy while there are mails
	spare  []*mail // to use again

	state    workerState // changed by moveTo only
	faults   faults
	hungWith uint64 // outlivedLease: the batch; the worker may finish it before it is dead
	deathDue int64  // awaited: when it is quarantined unless it is dead by then
	forgiven bool   // the broker stood still at deathDue
	standing        // suspend.go

	batches  uint64
	computed time.Duration
	restarts int // earlier workers of its name
}

// mail is the broker's private copy of a posted batch.
type mail struct {
	batch      uint64
	number     uint64
	posted     int64
	rows       uint32
	begun      int64 // when its lease began, as far as the broker knows; see leaseOf
	forgiven   bool  // the broker stood still when its lease ended
	requests   []mailed
	unanswered int // requests that failed, or ended before the worker took them
}

type mailed struct{ head, gen uint32 }

func (w *WorkerSession) newMail() *mail {
	if n := len(w.spare); n > 0 {
		p := w.spare[n-1]
		w.spare = w.spare[:n-1]
		p.requests, p.unanswered = p.requests[:0], 0
		return p
	}
	return &mail{}
}

// setMails changes a worker's mails, and keeps the list of busy workers.
func (s *Stage) setMails(w *WorkerSession, mails []*mail) {
	had, has := len(w.mails) > 0, len(mails) > 0
	w.mails = mails
	switch {
	case has && !had:
		w.at = len(s.busy)
		s.busy = append(s.busy, w)
	case had && !has:
		last := s.busy[len(s.busy)-1]
		s.busy[w.at], last.at = last, w.at
		s.busy = s.busy[:len(s.busy)-1]
	}
}

// followLanesOf adopts the number of lanes that a worker has written since it attached.
// Such a worker holds back, so it gets no batches in advance.
func (s *Stage) followLanesOf(w *WorkerSession) {
	lanes := min(int(w.box.Lanes.Load()), w.info.Depth)
	if lanes <= 0 || (w.desc.Lanes == lanes && w.desc.Depth == lanes) {
		return
	}
	w.desc.Lanes, w.desc.Depth = lanes, lanes
	s.describeWorker(w)
}

func (s *Stage) describeWorker(w *WorkerSession) {
	if w.state != workerServing && w.state != workerSuspended {
		return
	}
	d := w.desc
	d.Paused, d.Doubted = w.state == workerSuspended, w.doubted
	if w.probation {
		d.Lanes, d.Depth = 1, 1
	}
	s.batcher.WorkerReady(d)
}

func (s *Stage) checkWorkerInfo(info *WorkerInfo) (desc batcher.Worker, err error) {
	if info.Depth < 1 || info.Depth > shm.MaxMailDepth {
		return desc, fmt.Errorf("%w: depth %d, must be 1..%d", status.ErrInvalid, info.Depth, shm.MaxMailDepth)
	}
	if info.Lanes < 0 || info.Lanes > info.Depth {
		return desc, fmt.Errorf("%w: lanes %d, must be 0..%d (the depth)", status.ErrInvalid, info.Lanes, info.Depth)
	}
	desc = batcher.Worker{Share: max(1, info.Share), Lanes: max(1, info.Lanes), Depth: info.Depth, PadTo: info.PadTo}
	switch most := s.most; info.Pad {
	case "":
	case "fixed":
		desc.Pad = batcher.PadFixed
		if info.PadTo < most || info.PadTo > shm.MaxBatchRows {
			return desc, fmt.Errorf("%w: pad_to is %d, must be max_batch_size (%d) or more", status.ErrInvalid, info.PadTo, most)
		}
	case "preferred":
		desc.Pad = batcher.PadPreferred
	default:
		return desc, fmt.Errorf("%w: pad is %q, must be fixed or preferred", status.ErrInvalid, info.Pad)
	}
	return desc, nil
}

// ErrOtherProgram refuses a worker that computes something else than those of its model.
var ErrOtherProgram = fmt.Errorf("%w: another program serves the model", status.ErrInvalid)

const anyProgram = "any"

// joins says whether the answers of a worker may mix with those of one that serves.
func (i *WorkerInfo) joins(serving *WorkerInfo) bool {
	return i.Program == serving.Program || i.Program == anyProgram || i.Group != "" && i.Group == serving.Group
}

// checkProgram refuses a worker that joins none of the stage's workers.
func (s *Stage) checkProgram(info *WorkerInfo) error {
	var other *WorkerSession
	for _, w := range s.workers {
		if w == nil || w.state == workerDying || w.faults.has(hungUp) {
			continue
		}
		if info.joins(&w.info) {
			return nil
		}
		if w.info.Program != anyProgram { // that one does not speak for others
			other = w
		}
	}
	if other == nil {
		return nil
	}
	return fmt.Errorf("%w: %q is served by pid %d as %q, this worker serves %q, and their answers would mix; end that worker, serve "+
		"this one under another name, or let it join with --join any (in a program version=\"any\")",
		ErrOtherProgram, s.name, other.Pid, other.info.Program, info.Program)
}

func (s *Stage) openWorker(p *Peer, info *WorkerInfo) error {
	if _, err := s.checkWorkerInfo(info); err != nil {
		return err
	}
	return p.openSession(s.ring, shm.KindWorker, shm.WorkerSegmentSize(info.Depth, s.ring.layout.MaxBatch))
}

// attachWorker lets an open session get batches. On an error it stays the caller's.
func (s *Stage) attachWorker(p *Peer, info WorkerInfo) (*WorkerSession, error) {
	desc, err := s.checkWorkerInfo(&info)
	if err != nil {
		return nil, err
	}
	w := &WorkerSession{Peer: p, stage: s, info: info, restarts: s.stats.deaths[p.Name]}
	w.box = shm.NewMailbox(p.seg, info.Depth, s.ring.layout.MaxBatch)
	w.done = shm.NewConsumer(shm.DoneRing(p.seg, info.Depth))
	if err := p.watchPeer(s.loop, s.touch, func() { s.workerDied(w) }); err != nil {
		return nil, err
	}
	i := slices.Index(s.workers, nil)
	if i < 0 {
		i = len(s.workers)
		s.workers = append(s.workers, nil)
	}
	s.workers[i] = w
	s.present++
	s.staffed.Store(true)
	if spare := s.loop.outside.WorkerCame(w.Pid, w.Kin, s.present == 1); !spare {
		w.moveTo(workerServing)
	}
	w.id = batcher.WorkerID(i)
	desc.ID = w.id
	w.desc = desc
	s.describeWorker(w)
	if s.lostAt > 0 {
		s.startTook, s.lostAt = min(s.loop.now-s.lostAt, int64(lastBackoff)), 0
	}
	s.stats.attached++
	s.touch()
	s.noteWorker("worker attached", w)
	s.log.Info("worker attached", "worker", w.Label(), "id", w.id, "pid", w.Pid, "gpu", info.GPU, "spare", w.state == workerSpare)
	return w, nil
}
