// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"time"

	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
)

// simWorker obeys the worker's side of the protocol, step by step.
type simWorker struct {
	s          *world
	name       string
	sess       *workerSession
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
	dead       bool
	garbage    bool
}

// simBatch is a batch on its way through a worker:
//
//	taken → outputs written → word, word, bell … → done
type simBatch struct {
	id    uint64
	reqs  []shm.MailRequest
	wrote int
	ended int
}

func (w *simWorker) act() {
	s := w.s
	if w.dead || s.now < w.stopped {
		return
	}
	switch k := s.rng.IntN(200); {
	case w.killed && k < 100:
		w.die("is killed")
	case s.calm && w.sess.broken: // not even its owner wants it any more
		w.die("is killed by its owner")
	case !s.calm && k < 1:
		w.die("dies")
	case !s.calm && k < 2 && !w.closing:
		w.stopped = s.now + s.rng.Int64N(int64(60*time.Millisecond))
		s.note("%s is stopped for %d µs", w.name, (w.stopped-s.now)/1000)
	case !s.calm && k < 3 && !w.killed:
		s.note("%s is closing", w.name)
		w.closing = true
	case !s.calm && w.garbage && k < 6:
		w.scribble()
	case len(w.batches) > 0 && (k < 150 || w.closing):
		w.work()
	case w.closing:
		w.dead = true
		s.tell(w.name+" hangs up", func() { s.st.workerLost(w.sess, "simulated") })
		s.tell(w.name+" is dead", func() { s.st.workerDied(w.sess) })
	default:
		w.take()
	}
}

func (w *simWorker) die(how string) {
	w.s.note("%s %s", w.name, how)
	w.dead = true
	if w.s.chance(0.5) {
		w.s.tell(w.name+" hangs up", func() { w.s.st.workerLost(w.sess, "simulated") })
	}
	w.s.tell(w.name+" is dead", func() { w.s.st.workerDied(w.sess) })
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
	b := &simBatch{id: mail.Batch}
	for _, q := range reqs[:mail.Requests] {
		if word := w.s.r.board.Word(q.Slot); int32(q.Gen-word.Generation()) > 0 {
			b.reqs = append(b.reqs, q)
		}
	}
	w.batches = append(w.batches, b)
	w.s.note("%s takes batch %d with %d requests", w.name, b.id, len(b.reqs))
}

// work is one step of one batch.
func (w *simWorker) work() {
	s := w.s
	at := s.rng.IntN(len(w.batches))
	b := w.batches[at]
	switch {
	case b.wrote < len(b.reqs):
		w.write(&b.reqs[b.wrote])
		b.wrote++
	case b.ended < len(b.reqs):
		q := &b.reqs[b.ended]
		won := s.r.board.End(q.Slot, q.Gen, status.OK, false)
		s.note("%s ends slot %d generation %d: %v", w.name, q.Slot, q.Gen, won)
		b.ended++
		if !s.calm && s.chance(0.02) {
			w.die("dies between word and bell")
			return
		}
		if b.ended == len(b.reqs) || b.reqs[b.ended].Bell != q.Bell {
			s.r.board.Ring(q.Bell)
		}
	default:
		w.batches = append(w.batches[:at], w.batches[at+1:]...)
		ring, full := w.done.Push(&shm.Done{Batch: b.id, Started: s.now - 1000, Finished: s.now})
		if full && !w.garbage {
			s.fail("%s: done ring is full", w.name)
		}
		s.note("%s is done with batch %d, ring %v", w.name, b.id, ring)
		if !s.calm && s.chance(0.02) {
			w.die("dies between done and bell")
			return
		}
		w.ring(ring)
	}
}

func (w *simWorker) ring(ring bool) {
	if (ring || w.s.chance(0.05)) && !w.rung {
		w.rung = true
		w.s.tell(w.name+" rings", func() { w.rung = false; w.s.st.touch() })
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
		if !info.client.left && in != stamp(q.Slot, q.Gen) {
			s.fail("%s finds %x as input of slot %d generation %d", w.name, in, q.Slot+i, q.Gen)
		}
		*s.value(&s.r.layout.Outputs[0], q.Slot+i) = stamp(q.Slot, q.Gen)
	}
}

// scribble breaks the protocol: the worker must be killed before its slots
// are used again.
func (w *simWorker) scribble() {
	s := w.s
	s.note("%s pushes garbage", w.name)
	w.done.Push(&shm.Done{Batch: s.rng.Uint64() | 1<<40, Started: s.rng.Int64(), Finished: -s.rng.Int64()})
	w.ring(true)
}
