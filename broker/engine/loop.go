// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"runtime"
	"slices"
	"time"

	"github.com/ringbatch/ringbatch/admin/stats"
	"github.com/ringbatch/ringbatch/broker/batcher"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
)

// The event loop: its rounds, and the rings that it serves.

// DefaultLoops is one loop for every two cores, eight at most. A busy loop takes a core,
// and its clients and workers another. Loops that sleep for microseconds (shm.Parker)
// must leave processors to the Go scheduler.
func DefaultLoops() int { return min(max(1, runtime.GOMAXPROCS(0)/2), 8) }

// Loop serves some of the rings: one goroutine that owns all of their state.
// Other goroutines reach a ring by functions posted to its loop.
//
// A round:
//
//  1. wait: spin while that pays, then park (poller.go)
//  2. events: the loop enqueues clients that rang, and handles deaths
//  3. turns: the loop reads the enqueued clients' commits
//  4. settle: posted functions, timers that are due, outcomes for peers
//     (outcomes.go), and a decision for every stage that something happened to
//
// Idle rings are on none of the lists, so they cost a round nothing.
type Loop struct {
	*poller
	rings map[*Ring]struct{}

	number int
	now    int64  // when this round began
	round  uint64 // this round's number

	dirty      []*Stage // to decide at the end of this round
	outcomes   []outcome
	entries    [clientTurn]shm.Commit // of the client that has its turn
	timers     timers                 // by when they are due
	spinning   []*Stage               // may be worth spinning for
	waiting    []*Ring                // with unread commits, in the order of their visits
	active     int                    // stages with requests queued or running
	draining   bool
	drainSince int64
	stopping   bool
	ended      chan struct{} // closed when the loop has ended

	work stats.Loop

	clock   func() int64 // replaced by the simulation
	drained func()       // called once, when nothing is left to drain
	outside Outside
}

// Outside is the process around a loop. No method waits for a loop.
type Outside interface {
	// Kill ends a worker's process. Without an error its death is certain, and the
	// pidfd reports when it happens.
	// left says that the process may have ended by itself.
	Kill(p *Peer, left bool) error
	Offended(Process) // a peer broke the protocol
	// WorkerCame reports a worker with its Peer.Kin, the first of its model or not. A spare gets no batches.
	WorkerCame(pid int, kin []int, first bool) (spare bool)
	// WorkerLeft reports the end of a worker, and whether it had begun a batch. replace
	// says that a spare may take its place.
	WorkerLeft(pid int, withBatch, last bool) (replace bool)
	Promoted(spare, lost int) // pids
	// WorkerFailed reports a worker that fails batches which others run. replaced says
	// that its process is ended and started again.
	WorkerFailed(pid int) (replaced bool)
}

// NewLoop makes a loop for Run. It may keep a P while it sleeps for milliseconds; all
// loops together keep half of the process's Ps at most.
func NewLoop(number int, out Outside) (*Loop, error) {
	p, err := newPoller()
	if err != nil {
		return nil, err
	}
	p.parker.Alone = true
	p.yields = number >= DefaultLoops()
	return &Loop{
		poller: p, number: number, rings: map[*Ring]struct{}{}, now: shm.Now(), ended: make(chan struct{}),
		clock: shm.Now, outside: out, drained: func() {},
	}, nil
}

// Run serves until Stop. It calls drained once when, after Drain, nothing is left.
func (l *Loop) Run(drained func()) error {
	defer close(l.ended)
	defer shm.AskShortSlice()()
	l.drained = drained
	for !l.stopping {
		until := l.timers.nextDue()
		if len(l.waiting) > 0 || l.morePosts {
			until = l.now
		}
		if err := l.waitForEvents(until, l.spinUntil(), l.beginRound); err != nil {
			return err
		}
		l.settleRound()
	}
	return nil
}

func (l *Loop) beginRound() {
	l.now = l.clock()
	l.round++
}

// Turns. A loop visits a ring for as many rows as fill a batch, between these limits,
// and then the next ring. A round ends after roundRows, and the next round goes on
// from there. So a client waits for one visit of each other ring, and in its ring for
// one short turn of each other client, however much they send.
const (
	leastVisit = 128
	mostVisit  = 1024
	roundRows  = 4096
)

func (l *Loop) visitRings() {
	for n, rows := len(l.waiting), 0; n > 0 && rows < roundRows; n-- {
		r := l.waiting[0]
		l.waiting = slices.Delete(l.waiting, 0, 1)
		r.inLine = false
		rows += r.visitClients(min(max(leastVisit, r.layout.MaxBatch), mostVisit))
		if len(r.unread) > 0 {
			l.work.Turns++
			l.enqueueRing(r)
		}
	}
}

func (l *Loop) enqueueRing(r *Ring) {
	if !r.inLine {
		r.inLine = true
		l.waiting = append(l.waiting, r)
	}
}

func (l *Loop) settleRound() {
	l.visitRings()
	l.runPosts()
	for l.timers.nextDue() <= l.now {
		s := l.timers[0]
		l.timers.setTimer(s, never)
		l.work.Timers++
		s.endOverdueLeases()
		s.touch()
	}
	for len(l.dirty) > 0 || len(l.outcomes) > 0 {
		for i := 0; i < len(l.dirty); i++ { // a request that goes on to the next stage appends it
			l.dirty[i].catchUp()
		}
		l.applyOutcomes()
		l.decideDirty()
	}
	if l.draining && l.active == 0 && l.drained != nil {
		l.drained()
		l.drained = nil
	}
}

// decideDirty has the dirty stages decide. They may be dirty again afterwards.
func (l *Loop) decideDirty() {
	n := len(l.dirty)
	for i := range n {
		l.dirty[i].decide()
	}
	l.dirty = slices.Delete(l.dirty, 0, n)
}

// spinUntil is until when it pays to spin for commits; see Stage.waitsForMore.
func (l *Loop) spinUntil() int64 {
	t := int64(0)
	l.spinning = slices.DeleteFunc(l.spinning, func(s *Stage) bool {
		until := s.arrived + int64(shm.LeastSpin)
		if s.spins = s.waitsForMore(); s.spins {
			t = max(t, until)
			s.spins = until > l.now
		}
		return !s.spins
	})
	return t
}

// AdoptRing takes a ring and its stages over. It is called on the loop, or before Run.
func (l *Loop) AdoptRing(r *Ring) {
	l.rings[r] = struct{}{}
	if l.draining {
		r.reapplyPolicies()
	}
}

// ForgetRing gives a ring and its stages back for good. It is called on the loop.
func (l *Loop) ForgetRing(r *Ring) {
	delete(l.rings, r)
	is := func(x *Stage) bool { return x.ring == r }
	l.dirty = slices.DeleteFunc(l.dirty, is)
	l.spinning = slices.DeleteFunc(l.spinning, is)
	l.outcomes = slices.DeleteFunc(l.outcomes, func(o outcome) bool { return o.ring() == r })
	l.waiting = slices.DeleteFunc(l.waiting, func(x *Ring) bool { return x == r })
	for _, s := range r.stages {
		l.timers.setTimer(s, never)
		s.dirty = true // touch does nothing from now on
		if s.active {
			l.active--
		}
		s.closeWorkers()
	}
	r.closed = true
	go r.closeMemory() // giving back gigabytes takes a while
}

// Drain refuses new requests. It returns after the round in which the drain began.
func (l *Loop) Drain() {
	l.Do(func() {
		l.draining, l.drainSince = true, l.now
		for r := range l.rings {
			r.reapplyPolicies()
		}
	})
	l.Do(func() {})
}

// reapplyPolicies has the stages of a loop that drains wait no longer; see applyPolicy.
func (r *Ring) reapplyPolicies() {
	for _, s := range r.stages {
		_ = s.applyPolicy(s.settings) // it was in force before, so it fits
	}
}

// Stop ends the loop after its present round.
func (l *Loop) Stop() { l.Post(func() { l.stopping = true }) }

// Abandon says that Run will never be called, so that Do does not wait for it.
func (l *Loop) Abandon() { close(l.ended) }

// Snapshot is the loop's counts; false if the loop has ended.
func (l *Loop) Snapshot() (s stats.Loop, ok bool) {
	ok = l.Do(func() {
		s = l.work
		s.Models, s.Rounds = len(l.rings), l.round
	})
	return s, ok
}

// Do runs f on the loop and waits for it; false if the loop has ended.
func (l *Loop) Do(f func()) bool {
	done := make(chan struct{})
	l.Post(func() { f(); close(done) })
	select {
	case <-done:
		return true
	case <-l.ended:
	}
	select {
	case <-done: // in the loop's last round
		return true
	default:
		return false
	}
}

// ReleaseRings closes all rings of a loop that has ended.
func (l *Loop) ReleaseRings() {
	for r := range l.rings {
		for _, s := range r.stages {
			s.closeWorkers()
		}
		r.Close()
	}
}

// EndUnserved ends the queued requests of models that have had no worker for grace, and
// get none. Clients may send them again, to another broker. It is called on the loop.
func (l *Loop) EndUnserved(grace time.Duration, mayServe func(model string) bool) {
	for r := range l.rings {
		for _, s := range r.stages {
			since := max(s.vacant, l.drainSince)
			if s.present == 0 && s.batcher.Queued() > 0 && l.now >= since+int64(grace) && !mayServe(s.name) {
				s.log.Warn("no worker is there to finish what was accepted: it ends as Draining", "requests", s.batcher.Queued())
				s.refuseQueued(ending{code: status.ErrDraining})
			}
		}
	}
}

func (s *Stage) refuseQueued(e ending) {
	s.touch()
	for c := range s.ring.clients {
		for _, id := range s.batcher.CancelWaiting(batcher.ClientID(c.first), c.window) {
			s.ring.settle(uint32(id), ended, e)
		}
	}
}

// SendIdleClientsOn hangs up on clients without requests, for the other broker. Clients of
// private models stay: clearing would destroy answers that they have not read.
func (l *Loop) SendIdleClientsOn() {
	for r := range l.rings {
		for c := range r.clients {
			if c.busy == 0 && !r.stages[0].settings.Private {
				r.clientLeft(c, "another broker takes over")
			}
		}
	}
}
