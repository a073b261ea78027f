// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"runtime"
	"slices"

	"github.com/ringbatch/ringbatch/admin/stats"
	"github.com/ringbatch/ringbatch/shm"
)

// DefaultLoops is one loop for every two cores, eight at most. A loop at its
// limit takes a core, and the clients and workers that keep it there take at
// least another; more loops than that would only take cores from them. Nor
// may all of the Go scheduler's processors be held by loops that sleep for
// microseconds (shm.Parker). Idle loops cost nothing.
func DefaultLoops() int { return min(max(1, runtime.GOMAXPROCS(0)/2), 8) }

// loop serves some of the rings: one goroutine that owns all of their state.
// Loops share nothing. Everybody else reaches a ring by functions posted to its
// loop.
//
// A round:
//
//  1. wait: spin while that pays, then park (poller.go)
//  2. events: clients that rang are put in line; deaths
//  3. turns of those in line
//  4. settle: posted functions, timers that are due, outcomes of what peers wrote
//     (outcomes.go), and a decision for every stage that something happened to
//
// A round costs as much as there is to do: idle rings are on none of its lists.
type Loop struct {
	*poller
	rings map[*Ring]struct{}

	number int
	now    int64  // when this round began
	round  uint64 // its number

	dirty      []*Stage // to decide at the end of this round
	outcomes   []outcome
	entries    [clientTurn]shm.Commit // of the client that has its turn
	timers     timers                 // by when they are due
	spinning   []*Stage               // may be worth spinning for
	waiting    []*Ring                // whose clients have something to be read, in this order
	active     int                    // stages with something queued or running
	draining   bool
	drainSince int64
	stopping   bool
	ended      chan struct{} // closed when the loop has ended

	work stats.Loop

	clock   func() int64 // replaced by the simulation
	drained func()       // nothing is left to drain; called once
	outside Outside
}

// Outside is the process around a loop, as far as the loop has to tell or ask it
// about peers. No method waits for a loop.
type Outside interface {
	// Kill ends a worker's process. Without an error its death is certain, but not
	// yet over: the pidfd tells when.
	Kill(*Peer) error
	Offended(Process)                            // a peer broke the protocol
	WorkerCame(pid int, first bool) (spare bool) // first: its model had none before; spare: it is to wait
	// withBatch: one that it had begun; replace: a spare may take its place
	WorkerLeft(pid int, withBatch, last bool) (replace bool)
	Promoted(spare, lost int) // pids
	// workerFailed: a worker fails what others run; replaced: it is ended and started again
	WorkerFailed(pid int) (replaced bool)
}

// NewLoop makes a loop for Run. alone: the process does little else, so that the
// loop may keep one of its Ps while it sleeps for milliseconds.
func NewLoop(number int, alone bool, out Outside) (*Loop, error) {
	p, err := newPoller()
	if err != nil {
		return nil, err
	}
	p.parker.Alone = alone
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
			until = l.now // they have waited for the others, not for time
		}
		if err := l.waitForEvents(until, l.spinUntil(), l.beginRound); err != nil {
			return err
		}
		l.settleRound()
	}
	return nil
}

// beginRound starts a round.
func (l *Loop) beginRound() {
	l.now = l.clock()
	l.round++
}

// Turns. A ring is visited for as many rows as fill a batch, between these
// limits, and then the next one is; all of a round's visits together end at
// roundRows, and the next round goes on where this one stopped. So a client that has
// little to say waits for one visit of each other ring that has something, and
// inside its ring for one short turn of each other client, however much they
// send and whatever it is.
const (
	leastVisit = 128
	mostVisit  = 1024
	roundRows  = 4096
)

// visitRings visits the rings in line.
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

// enqueueRing puts a ring in line.
func (l *Loop) enqueueRing(r *Ring) {
	if !r.inLine {
		r.inLine = true
		l.waiting = append(l.waiting, r)
	}
}

// settleRound ends a round: what its events and the time have made possible is done.
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
	for l.hasToDecide() {
		for i := 0; i < len(l.dirty); i++ { // requests may go on to the next stage, which follows
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

func (l *Loop) hasToDecide() bool { return len(l.dirty) > 0 || len(l.outcomes) > 0 }

// decideDirty has the stages that something happened to decide. A stage that has to
// decide again is among them afterwards.
func (l *Loop) decideDirty() {
	n := len(l.dirty)
	for i := range n {
		l.dirty[i].decide()
	}
	l.dirty = slices.Delete(l.dirty, 0, n)
}

// spinUntil is until when it pays to spin for commits: see stage.waitsForMore.
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

// Adopt takes a ring and its stages over. It is called on the loop, or before Run.
func (l *Loop) Adopt(r *Ring) {
	l.rings[r] = struct{}{}
	if l.draining {
		l.hurryRing(r)
	}
}

// Forget gives a ring and its stages back for good. It is called on the loop.
func (l *Loop) Forget(r *Ring) {
	delete(l.rings, r)
	is := func(x *Stage) bool { return x.ring == r }
	l.dirty = slices.DeleteFunc(l.dirty, is)
	l.spinning = slices.DeleteFunc(l.spinning, is)
	l.outcomes = slices.DeleteFunc(l.outcomes, func(o outcome) bool { return o.ringOf() == r })
	l.waiting = slices.DeleteFunc(l.waiting, func(x *Ring) bool { return x == r })
	for _, s := range r.stages {
		l.timers.setTimer(s, never)
		s.dirty = true // so that nothing marks it again
		if s.active {
			l.active--
		}
		s.closeWorkers()
	}
	r.closed = true
	go r.closeMemory() // no peer has it any more; giving back gigabytes takes a while
}

// Drain lets accepted requests finish, and refuses new ones. When it returns, the
// loop has ended the round in which it began to drain.
func (l *Loop) Drain() {
	l.Do(l.beginDrain)
	l.Do(func() {})
}

func (l *Loop) beginDrain() {
	l.draining, l.drainSince = true, l.now
	for r := range l.rings {
		l.hurryRing(r)
	}
}

func (l *Loop) hurryRing(r *Ring) {
	for _, s := range r.stages {
		_ = s.applyPolicy(s.settings) // it was in force before, so it fits
	}
}

// Stop ends the loop after the round that it is in.
func (l *Loop) Stop() { l.Post(func() { l.stopping = true }) }

// Abandon says that Run will never be called, so that Do does not wait for it.
func (l *Loop) Abandon() { close(l.ended) }

// Snapshot is how much the loop did, and for how many models; false if it has ended.
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
	case <-done: // in its last round
		return true
	default:
		return false
	}
}

// ReleaseRings gives back all that the loop serves. It must have ended.
func (l *Loop) ReleaseRings() {
	for r := range l.rings {
		for _, s := range r.stages {
			s.closeWorkers()
		}
		r.Close()
	}
}
