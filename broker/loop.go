// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"runtime"
	"slices"

	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/stats"
)

// MaxLoops bounds Config.Loops.
const MaxLoops = 64

// DefaultLoops is one loop for every two cores, eight at most. A loop at its
// limit takes a core, and those who keep it there, clients and workers, take
// at least another; more loops than that would only take cores from them. Nor
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
//  4. settle: posted functions, timers that are due, and a decision for every
//     stage that something happened to
//
// It costs what is due, not what exists: idle rings are on none of its lists.
type loop struct {
	*poller
	rings map[*ring]struct{}

	number int
	now    int64  // when this round began
	round  uint64 // its number

	dirty      []*stage // to decide at the end of this round
	timers     timers   // by when they are due
	spinning   []*stage // may be worth spinning for
	waiting    []*ring  // whose clients have something to be read, in this order
	active     int      // stages with something queued or running
	draining   bool
	drainSince int64
	stopping   bool
	ended      chan struct{} // closed when the loop has ended

	work stats.Loop

	// The world outside, replaced by the simulation.
	clock    func() int64
	killPeer func(*peer) error
	drained  func() // nothing is left to drain; called once
	outside  outside
}

// outside is whom a loop tells of its peers. Nothing of it waits for a loop.
type outside interface {
	offended(process)                            // a peer broke the protocol
	workerCame(pid int, first bool) (spare bool) // first: its model had none before; spare: it is to wait
	// withBatch: one that it had begun; replace: a spare may take its place
	workerLeft(pid int, withBatch, last bool) (replace bool)
	promoted(spare, lost int) // pids
}

func newLoop(number int, out outside) (*loop, error) {
	p, err := newPoller()
	if err != nil {
		return nil, err
	}
	p.yields = number >= DefaultLoops()
	return &loop{
		poller: p, number: number, rings: map[*ring]struct{}{}, now: shm.Now(), ended: make(chan struct{}),
		clock: shm.Now, killPeer: (*peer).kill, outside: out, drained: func() {},
	}, nil
}

// run serves until stop was posted.
func (l *loop) run() error {
	defer close(l.ended)
	defer shm.AskShortSlice()()
	for !l.stopping {
		until := l.timers.next()
		if len(l.waiting) > 0 || l.morePosts {
			until = l.now // they have waited for the others, not for time
		}
		if err := l.wait(until, l.spinUntil(), l.begin); err != nil {
			return err
		}
		l.settle()
	}
	return nil
}

// begin starts a round.
func (l *loop) begin() {
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

// turns visits the rings in line.
func (l *loop) turns() {
	for n, rows := len(l.waiting), 0; n > 0 && rows < roundRows; n-- {
		r := l.waiting[0]
		l.waiting = slices.Delete(l.waiting, 0, 1)
		r.inLine = false
		rows += r.visit(min(max(leastVisit, r.layout.MaxBatch), mostVisit))
		if len(r.unread) > 0 {
			l.work.Turns++
			l.enqueue(r)
		}
	}
}

// enqueue puts a ring in line.
func (l *loop) enqueue(r *ring) {
	if !r.inLine {
		r.inLine = true
		l.waiting = append(l.waiting, r)
	}
}

// settle ends a round: what its events and the time have made possible is done.
func (l *loop) settle() {
	l.turns()
	l.runPosts()
	for l.timers.next() <= l.now {
		s := l.timers[0]
		l.timers.set(s, never)
		l.work.Timers++
		s.endOverdueLeases()
		s.touch()
	}
	for len(l.dirty) > 0 {
		s := l.dirty[len(l.dirty)-1]
		l.dirty = l.dirty[:len(l.dirty)-1]
		l.work.Decisions++
		s.decide()
	}
	if l.draining && l.active == 0 && l.drained != nil {
		l.drained()
		l.drained = nil
	}
}

// spinUntil is until when it pays to spin for commits: see stage.waitsForMore.
func (l *loop) spinUntil() int64 {
	t := int64(0)
	l.spinning = slices.DeleteFunc(l.spinning, func(s *stage) bool {
		until := s.arrived + int64(shm.LeastSpin)
		if s.spins = s.waitsForMore(); s.spins {
			t = max(t, until)
			s.spins = until > l.now
		}
		return !s.spins
	})
	return t
}

// adopt takes a ring and its stages over, forget gives them back for good.
func (l *loop) adopt(r *ring) {
	l.rings[r] = struct{}{}
	if l.draining {
		l.hurry(r)
	}
}

func (l *loop) forget(r *ring) {
	delete(l.rings, r)
	is := func(x *stage) bool { return x.ring == r }
	l.dirty = slices.DeleteFunc(l.dirty, is)
	l.spinning = slices.DeleteFunc(l.spinning, is)
	l.waiting = slices.DeleteFunc(l.waiting, func(x *ring) bool { return x == r })
	for _, s := range r.stages {
		l.timers.set(s, never)
		s.dirty = true // so that nothing marks it again
		if s.active {
			l.active--
		}
		s.close()
	}
	r.closed = true
	go r.closeMemory() // nobody has it any more; giving back gigabytes takes a while
}

// drain lets what was accepted finish. New requests are refused.
func (l *loop) drain() {
	l.draining, l.drainSince = true, l.now
	for r := range l.rings {
		l.hurry(r)
	}
}

func (l *loop) hurry(r *ring) {
	for _, s := range r.stages {
		_ = s.apply(s.settings) // it was in force before, so it fits
	}
}

// stop ends the loop after this round.
func (l *loop) stop() { l.stopping = true }

// snapshot is what the loop did, and for how many models.
func (l *loop) snapshot() stats.Loop {
	s := l.work
	s.Models, s.Rounds = len(l.rings), l.round
	return s
}

// do runs f on the loop and waits for it; false if the loop has ended.
func (l *loop) do(f func()) bool {
	done := make(chan struct{})
	l.post(func() { f(); close(done) })
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

// releaseRings gives back all that the loop serves. It must have ended.
func (l *loop) releaseRings() {
	for r := range l.rings {
		for _, s := range r.stages {
			s.close()
		}
		r.close()
	}
}
