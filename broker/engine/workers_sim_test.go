// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"time"

	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
)

// simWorker obeys the worker's side of the protocol, step by step.
type simWorker struct {
	s          *world
	name       string
	sess       *WorkerSession
	box        *shm.Mailbox
	done       shm.Producer[shm.Done]
	next       uint64
	seen       uint32
	asleep     bool
	batches    []*simBatch
	stopped    int64 // SIGSTOP until then
	rung       bool
	killed     bool // SIGKILL was sent; a few more steps may happen
	unkillable bool // another user's process
	closing    bool
	hungUp     bool // it works on without its connection
	dead       bool
	garbage    bool
	raises     bool             // it fails every batch as a whole
	lied       bool             // it broke a rule that must cost it its connection
	finished   map[uint64]int64 // when it was done with a batch
}

// simHistory is what befell a request that workers took.
type simHistory struct {
	poison simPoison
	deaths int  // workers that died with it
	died   bool // the last of its batches
	hangs  int  // those of them that had it for longer than their lease
	left   bool // a worker was done with it and never answered
	// Batches that failed as a whole with it, the most requests of its next one (0: no
	// limit), and the workers that failed it by itself.
	failures int
	share    int
	alone    []*simWorker
}

// maxFailures is how often a request may fail with its batch: as one of 6, 3, 1, and
// then once more on another worker.
const maxFailures = 4

// mayFail says whether the request may fail as its batch did. In a mild world, which has
// a healthy worker, the request must have failed by itself.
func (f *simHistory) mayFail(mild bool) bool {
	if mild {
		return f.poison >= raising && len(f.alone) > 0
	}
	return len(f.alone) > 0 || f.hangs >= maxHangs
}

// simPoison is how a request harms its workers.
type simPoison uint8

const (
	harmless simPoison = iota
	deadly
	hanging
	raising
	changing // its client changes it under the worker: it raises, or it does not
)

func (s *host) somePoison() simPoison {
	if s.mild {
		return raising
	}
	return simPoison(1 + s.rng.IntN(3))
}

func (w *simWorker) pastOf(q *shm.MailRequest) *simHistory {
	return w.pastOfMail(mailed{q.Slot, q.Gen})
}

func (w *simWorker) pastOfMail(q mailed) *simHistory {
	f := w.s.past[q]
	if f == nil {
		f = &simHistory{}
		w.s.past[q] = f
	}
	return f
}

// givenUp says that the worker must get no batches now.
func (w *simWorker) givenUp() bool {
	return w.sess.state == workerGone || w.sess.state == workerSuspended || w.sess.faults.has(hungUp) || w.sess.state.isGivenUp()
}

// mayBeKilled checks that a worker that is killed for its lease has outlived it.
func (w *simWorker) mayBeKilled() {
	s := w.s
	if !w.sess.faults.has(outlivedLease) {
		return
	}
	if n, _ := w.sess.done.Pending(); n > 0 && !w.sess.faults.has(brokeProtocol) {
		s.fail("%s is killed though it is done with something", w.name)
	}
	oldest := w.sess.mails[0]
	for _, q := range oldest.requests {
		if s.r.stillHas(q, oldest.batch) {
			w.pastOfMail(q).hangs++
		}
	}
	since := oldest.posted
	for batch, at := range w.finished {
		if batch < oldest.batch {
			since = max(since, at)
		}
	}
	if !oldest.forgiven {
		since = max(since, s.still)
	}
	if s.l.now-since < int64(s.st.settings.Lease) {
		s.fail("%s is killed after %d of its lease of %d µs", w.name, (s.l.now-since)/1000, s.st.settings.Lease.Microseconds())
	}
}

// simBatch is a batch on its way through a worker:
//
//	taken → outputs written → word, word, bell … → done
//	                        → texts → done, as a whole
type simBatch struct {
	id    uint64
	size  int  // requests of its mail
	died  bool // a worker died with its request
	reqs  []shm.MailRequest
	wrote int
	ended int
}

func (w *simWorker) act() {
	s := w.s
	if s.calm && w.unkillable {
		w.stopped = 0 // no kill will end it
	}
	if w.dead || s.now < w.stopped && !w.killed {
		return
	}
	switch k := s.rng.IntN(200); {
	case w.killed && k < 100:
		w.die("is killed")
	case s.calm && w.sess.faults.has(brokeProtocol):
		w.die("is killed by its owner")
	case s.faulty() && k < 1:
		w.die("dies")
	case s.faulty() && k < 2 && !w.closing:
		w.stopped = s.now + s.rng.Int64N(int64(60*time.Millisecond))
		s.note("%s is stopped for %d µs", w.name, (w.stopped-s.now)/1000)
	case s.faulty() && k < 3 && !w.killed:
		s.note("%s is closing", w.name)
		w.closing = true
	case s.faulty() && k < 4 && len(w.batches) > 0 && !w.hungUp && !w.killed:
		s.note("%s hangs up and works on", w.name)
		w.hungUp, w.closing = true, true
		s.report(w.name+" hangs up", func() { s.st.workerLost(w.sess, "simulated") })
	case s.faulty() && k < 5 && !w.garbage && !w.raises:
		s.note("%s begins to raise", w.name)
		w.raises = true
	case s.faulty() && w.garbage && k < 7:
		w.scribble()
	case len(w.batches) > 0 && (k < 150 || w.closing):
		w.work()
	case w.closing:
		w.dead = true
		if !w.hungUp {
			s.report(w.name+" hangs up", func() { s.st.workerLost(w.sess, "simulated") })
		}
		s.report(w.name+" is dead", func() { s.st.workerDied(w.sess) })
	default:
		w.take()
	}
}

func (w *simWorker) die(how string) {
	w.s.note("%s %s", w.name, how)
	w.dead = true
	for _, b := range w.batches {
		for i := range b.reqs {
			f := w.pastOf(&b.reqs[i])
			f.deaths++
			f.share, f.died = 1, true
		}
	}
	if w.s.chance(0.5) {
		w.s.report(w.name+" hangs up", func() { w.s.st.workerLost(w.sess, "simulated") })
	}
	w.s.report(w.name+" is dead", func() { w.s.st.workerDied(w.sess) })
}

// take is Worker.Next: the bell first, then the mailbox; then it parks.
func (w *simWorker) take() {
	if w.asleep && w.box.Bell.Load() == w.seen {
		return
	}
	w.box.Parked.Store(0)
	w.asleep = false
	w.seen = w.box.Bell.Load()
	if w.box.Tail.Load() == w.next {
		w.box.Parked.Store(1)
		w.asleep = w.box.Tail.Load() == w.next
		return
	}
	mail, reqs := w.box.At(w.next)
	w.next++
	w.box.Taken.Store(w.next)
	b := &simBatch{id: mail.Batch, size: int(mail.Requests)}
	for _, q := range reqs[:mail.Requests] {
		if f := w.pastOf(&q); f.share > 0 && b.size > f.share {
			w.s.fail("%s gets slot %d generation %d in a batch of %d, %d are the most", w.name, q.Slot, q.Gen, b.size, f.share)
		}
		w.s.used[q.Slot] = q.Gen
		if word := w.s.r.board.Word(q.Slot); int32(q.Gen-word.Generation()) > 0 {
			b.reqs = append(b.reqs, q)
			w.beginSteps(&q)
		}
	}
	if b.died = len(b.reqs) > 0 && w.pastOf(&b.reqs[0]).died; w.sess.info.Lanes > 1 && len(w.batches) > 0 && (b.died || w.batches[0].died) {
		w.s.fail("%s gets batch %d beside %d, and a worker died with one of them", w.name, b.id, w.batches[0].id)
	}
	w.batches = append(w.batches, b)
	w.s.note("%s takes batch %d with %d requests", w.name, b.id, len(b.reqs))
}

// beginSteps zeroes the states of fresh rows. The next states are torn until they are written.
func (w *simWorker) beginSteps(q *shm.MailRequest) {
	for slot := q.Slot; slot < q.Slot+q.Rows; slot++ {
		step := w.s.r.layout.ReadStep(w.s.r.planes.Bytes(), slot)
		if step&shm.StepFresh != 0 {
			*w.s.half(slot, step.Half()) = 0
		}
		*w.s.half(slot, 1-step.Half()) = -1
	}
}

// work is one step of one batch.
func (w *simWorker) work() {
	s := w.s
	at := s.rng.IntN(len(w.batches))
	b := w.batches[at]
	switch {
	case b.wrote < len(b.reqs):
		if w.suffers(&b.reqs[b.wrote]) {
			return
		}
		w.write(&b.reqs[b.wrote])
		b.wrote++
	case b.ended == 0 && w.raisesAt(b):
		w.batches = append(w.batches[:at], w.batches[at+1:]...)
		w.raise(b)
		w.countUnread(b)
	case b.ended < len(b.reqs):
		q := &b.reqs[b.ended]
		if b.ended++; s.faulty() && w.garbage && s.chance(0.1) {
			s.note("%s leaves slot %d generation %d unanswered", w.name, q.Slot, q.Gen)
			w.pastOf(q).left = true
		} else {
			won := s.r.board.End(q.Slot, q.Gen, status.OK, false)
			s.note("%s ends slot %d generation %d: %v", w.name, q.Slot, q.Gen, won)
		}
		if s.faulty() && s.chance(0.02) {
			w.die("dies between word and bell")
			return
		}
		if b.ended == len(b.reqs) || b.reqs[b.ended].Bell != q.Bell {
			s.r.board.Ring(q.Bell)
		}
	default:
		w.batches = append(w.batches[:at], w.batches[at+1:]...)
		w.finish(&shm.Done{Batch: b.id, Started: s.now - 1000, Finished: s.now})
		w.countUnread(b)
	}
}

// countUnread is for a worker that has pushed garbage. The broker reads nothing after
// that, so the worker dies with its unanswered requests.
func (w *simWorker) countUnread(b *simBatch) {
	for i := range b.reqs {
		q := &b.reqs[i]
		if w.lied && int32(q.Gen-w.s.r.board.Word(q.Slot).Generation()) > 0 {
			f := w.pastOf(q)
			f.deaths++
			f.share = 1
		}
	}
}

// finish pushes a "done" message.
func (w *simWorker) finish(done *shm.Done) {
	s := w.s
	if w.finished == nil {
		w.finished = map[uint64]int64{}
	}
	w.finished[done.Batch] = s.now
	ring, full := w.done.Push(done)
	if full && !w.garbage {
		s.fail("%s: done ring is full", w.name)
	}
	s.note("%s is done with batch %d, ring %v, failed as a whole %d", w.name, done.Batch, ring, done.Whole)
	if s.faulty() && s.chance(0.02) {
		w.die("dies between done and bell")
		return
	}
	w.ring(ring || done.Whole != 0)
}

// raisesAt says whether the worker's function raises for a batch.
func (w *simWorker) raisesAt(b *simBatch) bool {
	raises := w.raises
	for i := range b.reqs {
		poison := w.pastOf(&b.reqs[i]).poison
		raises = raises || poison == raising || poison == changing && w.s.chance(0.5)
	}
	return raises && !w.garbage && len(b.reqs) > 0
}

// raise fails a batch as a whole.
func (w *simWorker) raise(b *simBatch) {
	for i := range b.reqs {
		q := &b.reqs[i]
		if word := w.s.r.board.Word(q.Slot); int32(q.Gen-word.Generation()) <= 0 {
			continue
		}
		w.s.r.board.SetReason(q.Slot, "it raised")
		f := w.pastOf(q)
		if f.failures++; f.failures > maxFailures {
			w.s.fail("slot %d generation %d was run %d times", q.Slot, q.Gen, f.failures)
		}
		f.died = false
		if f.share = max(1, b.size/2); b.size == 1 {
			f.alone = append(f.alone, w)
		}
	}
	w.finish(&shm.Done{Batch: b.id, Started: w.s.now - 1000, Finished: w.s.now, Whole: 1})
}

// suffers lets a poisonous request harm its worker.
func (w *simWorker) suffers(q *shm.MailRequest) bool {
	switch f := w.pastOf(q); {
	case f.hangs >= maxHangs && !w.killed:
		w.s.fail("%s runs slot %d generation %d, which has hung %d workers", w.name, q.Slot, q.Gen, f.hangs)
	case f.deaths >= w.s.st.settings.MaxAttempts:
		w.s.fail("%s runs slot %d generation %d, with which %d workers died", w.name, q.Slot, q.Gen, f.deaths)
	case f.poison == deadly:
		w.die("dies of a request")
		return true
	case f.poison == hanging && !(w.s.calm && w.unkillable) && !w.killed:
		w.s.note("%s hangs of a request", w.name)
		w.stopped = w.s.now + int64(time.Hour)
		return true
	}
	return false
}

func (w *simWorker) ring(ring bool) {
	if (ring || w.s.chance(0.05)) && !w.rung {
		w.rung = true
		w.s.report(w.name+" rings", func() { w.rung = false; w.s.st.touch() })
	}
}

// write is where two owners of one slot would meet.
func (w *simWorker) write(q *shm.MailRequest) {
	s := w.s
	info := s.r.slot(q.Slot)
	if info.gen != q.Gen || info.worker != w.sess || info.state != running && info.state != held {
		s.fail("%s writes into slot %d for generation %d, which is %v generation %d", w.name, q.Slot, q.Gen, info.state, info.gen)
	}
	for i := range q.Rows {
		in := *s.value(&s.r.layout.Inputs[0], q.Slot+i)
		if info.client.isAttached() && in != stamp(q.Slot, q.Gen) {
			s.fail("%s finds %x as input of slot %d generation %d", w.name, in, q.Slot+i, q.Gen)
		}
		step := s.r.layout.ReadStep(s.r.planes.Bytes(), q.Slot+i)
		next := nextState(*s.half(q.Slot+i, step.Half()), in)
		*s.half(q.Slot+i, 1-step.Half()) = next
		*s.value(&s.r.layout.Outputs[0], q.Slot+i) = next
	}
}

// scribble breaks the protocol: the worker must be killed before its slots
// are used again.
func (w *simWorker) scribble() {
	s := w.s
	s.note("%s pushes garbage", w.name)
	_, full := w.done.Push(&shm.Done{Batch: s.rng.Uint64() | 1<<40, Started: s.rng.Int64(), Finished: -s.rng.Int64()})
	w.lied = w.lied || !full
	w.ring(true)
}
