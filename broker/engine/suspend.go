// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"slices"
	"time"

	"github.com/ringbatch/ringbatch/broker/batcher"
	"github.com/ringbatch/ringbatch/status"
)

// A broken worker that fails every batch finishes first, and would draw all work. The
// worker gets a strike when it fails a batch as a whole and others then run all of its
// requests. A poisonous request fails with others, too, so it is never a strike. After
// maxStrikes without a successful batch the worker is suspended:
//
//	           strikes              back-off over, or no other worker serves
//	serving ─────────────► suspended ─────────────► on probation: one batch at a time
//	   ▲                       ▲                        │ │
//	   │                       └── a batch fails ───────┘ │
//	   └──────────────────── a batch runs well ───────────┘
//
// The supervisor restarts a suspended worker, if it started that worker. The last worker
// that serves is never suspended.
const (
	maxStrikes   = 3
	mostStrikes  = 4 * maxStrikes // a client that changes its inputs has others' batches run well between
	firstBackoff = time.Second
	lastBackoff  = 30 * time.Second
)

// standing is how far a worker is trusted.
type standing struct {
	strikes   int              // failed batches that others ran, since it ran one well
	shared    []*ClientSession // that were in all of them
	doubted   bool             // its last batch failed as a whole
	probation bool             // it gets one batch at a time
	resumeAt  int64            // when the probation of a suspended worker begins; else 0
	backoff   time.Duration
}

// failure is a batch that failed as a whole, until its requests have ended, or died with its worker.
type failure struct {
	by      *WorkerSession
	died    bool             // by has died
	taken   bool             // by may have begun the batch
	price   batcher.Time     // of each request: its part of the time that the batch took
	clients []*ClientSession // of the requests that run again
	left    int              // requests that have not ended
	excused bool             // a request of it failed with others, too, or ended otherwise
}

func (s *Stage) newFailure(w *WorkerSession, p *mail) *failure {
	return &failure{by: w, taken: true, price: batcher.Time(s.loop.now-p.begun) / batcher.Time(len(p.requests))}
}

// countEnded counts a request of the failed batch that has ended, with its last worker.
func (f *failure) countEnded(last *WorkerSession, code status.Code) {
	f.excused = f.excused || code != status.OK || last == f.by
	if f.left--; f.left == 0 && !f.excused {
		f.by.stage.accuseWorker(f)
	}
}

// judgeBatch judges a worker by a batch that failed as a whole, or had a result.
func (s *Stage) judgeBatch(w *WorkerSession, failed, ranWell bool) {
	switch {
	case failed && w.probation:
		s.loop.collectOutcome(outcome{kind: failsOften, worker: w})
	case failed && !w.doubted:
		w.doubted = true
		s.describeWorker(w)
	case ranWell && (w.probation || w.doubted):
		w.standing = standing{}
		if w.state == workerSuspended {
			w.moveTo(workerServing)
		}
		s.describeWorker(w)
	case ranWell:
		w.strikes, w.shared = 0, nil
	}
}

// accuseWorker judges a batch that a worker failed and others ran. Either the worker is broken,
// or a client changes its inputs under the workers. So the blamed clients pay, and the worker gets a
// strike. It is suspended if its failed batches share no client, nobody else sent anything lately, or after mostStrikes.
// Otherwise the shared ones go into debt, so that their next batches are their own: a broken worker fails
// the batches of the others, too.
func (s *Stage) accuseWorker(f *failure) {
	w := f.by
	for _, c := range f.clients {
		if s.isBlamed(c) && !s.owes(c) { // otherwise it has paid
			s.chargeClient(c, f.price)
		}
	}
	if w.strikes++; w.strikes == 1 {
		w.shared = f.clients
	} else {
		w.shared = slices.DeleteFunc(w.shared, func(c *ClientSession) bool { return !c.isAmong(f.clients) })
	}
	several := false // processes, to tell a broken worker from one of them
	for c := range s.ring.clients {
		lately := c.isAmong(f.clients) || s.loop.now-s.ring.slot(c.last).arrived < int64(firstBackoff)
		several = several || len(w.shared) > 0 && lately && !c.isAmong(w.shared[:1])
	}
	switch {
	case w.strikes < maxStrikes:
	case !several || w.strikes >= mostStrikes:
		s.loop.collectOutcome(outcome{kind: failsOften, worker: w})
	default:
		for _, c := range w.shared {
			s.chargeClient(c, batcher.Suspicion)
		}
	}
}

// isAmong says whether one of the clients is of the same process.
func (c *ClientSession) isAmong(clients []*ClientSession) bool {
	return slices.ContainsFunc(clients, func(x *ClientSession) bool { return x.Process == c.Process })
}

// suspendWorker gives a worker that fails often no more batches, if others serve. The
// worker may have run a batch well meanwhile.
func (s *Stage) suspendWorker(w *WorkerSession) {
	if (!w.probation && w.strikes < maxStrikes) || !w.serves() || !s.othersServe(w) {
		return
	}
	s.touch()
	backoff := min(max(firstBackoff, 2*w.backoff), lastBackoff)
	w.moveTo(workerSuspended)
	w.standing = standing{doubted: true, resumeAt: s.loop.now + int64(backoff), backoff: backoff}
	s.resumeAt = min(s.resumeAt, w.resumeAt)
	s.stats.suspended++
	s.describeWorker(w)
	replaced := s.loop.outside.WorkerFailed(w.Pid)
	s.log.Warn("worker suspended: it failed batches that other workers ran",
		"worker", w.Label(), "pid", w.Pid, "replaced", replaced, "backoff", backoff)
	s.noteWorker("worker suspended", w)
}

// resumeSuspended begins probations: after a back-off, or when no other worker serves.
func (s *Stage) resumeSuspended() {
	if s.resumeAt == never {
		return
	}
	serve := s.othersServe(nil)
	if serve && s.loop.now < s.resumeAt {
		return
	}
	s.resumeAt = never
	for _, w := range s.workers {
		switch {
		case w == nil || w.resumeAt == 0:
		case serve && s.loop.now < w.resumeAt:
			s.resumeAt = min(s.resumeAt, w.resumeAt)
		default:
			w.resumeAt, w.probation = 0, true
			if w.state == workerSuspended {
				w.moveTo(workerServing)
				s.describeWorker(w)
				s.log.Info("suspended worker may prove itself", "worker", w.Label(), "pid", w.Pid)
			}
		}
	}
}

func (w *WorkerSession) serves() bool {
	return w.state == workerServing && !w.faults.has(brokeProtocol)
}

func (s *Stage) othersServe(w *WorkerSession) bool {
	for _, x := range s.workers {
		if x != nil && x != w && x.serves() {
			return true
		}
	}
	return false
}
