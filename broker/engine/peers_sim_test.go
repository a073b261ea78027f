// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"fmt"
	"time"

	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

// simClient obeys the client's side of the protocol, step by step, unless it is garbage.
type simClient struct {
	s       *world
	name    string
	sess    *ClientSession
	ring    shm.Producer[shm.Commit]
	slots   []simSlot
	seen    uint32 // the bell as it was before the last look
	asleep  bool
	rung    bool // a doorbell is under way
	dead    bool
	garbage bool
	lied    bool      // it broke a rule that must cost it its connection
	poison  simPoison // of all its requests
	oks     int
}

type simSlot struct {
	state    simSlotState
	gen      uint32
	rows     int
	deadline int64
	canceled bool
	step     shm.Step
	h        int64 // the state of its sequence, after the last delivered step
}

type simSlotState uint8

const (
	simFree simSlotState = iota
	simPart              // of a request that begins before it
	simCommitted
	simAbandoned
)

// stamp is the payload of a request.
func stamp(slot, gen uint32) int64 { return int64(slot)<<32 | int64(gen) }

// nextState is the state after a step, and the step's answer.
func nextState(state, input int64) int64 { return (state^input)*0x5851f42d4c957f2d + 1 }

func (s *world) value(p *shm.Plane, slot uint32) *int64 {
	return s.number(p.Row(s.r.planes.Bytes(), slot))
}

// half is one of the two states of a slot.
func (s *world) half(slot uint32, half int) *int64 {
	return s.number(s.r.layout.HalfRow(s.r.planes.Bytes(), 0, slot, half))
}

func (s *world) number(row []byte) *int64 {
	v, err := tensor.As[int64](tensor.Tensor{DType: tensor.I64, Shape: []int{1, 1}, Data: row})
	if err != nil {
		s.fail("view: %v", err)
	}
	return &v[0]
}

func (c *simClient) act() {
	s := c.s
	if c.dead {
		return
	}
	if !c.sess.isAttached() {
		s.fail("%s was thrown out for nothing", c.name)
	}
	switch k := s.rng.IntN(100); {
	case s.faulty() && k < 1:
		c.die()
	case s.faulty() && k < 2:
		c.leave("closes")
	case s.faulty() && c.garbage && k < 4:
		c.scribble()
	case !s.calm && k < 45:
		c.commit()
	case !s.calm && k < 52:
		c.cancel()
	default:
		c.look()
	}
}

func (c *simClient) die() {
	c.s.note("%s dies", c.name)
	c.leave("")
}

func (c *simClient) leave(how string) {
	if how != "" {
		c.s.note("%s %s", c.name, how)
	}
	c.dead = true
	c.s.report(c.name+" is gone", func() { c.s.r.clientLeft(c.sess, "simulated") })
	if c.s.chance(0.3) { // its connection and its pidfd report
		c.s.report(c.name+" is gone (again)", func() { c.s.r.clientLeft(c.sess, "simulated") })
	}
}

func (c *simClient) push(e *shm.Commit) {
	ring, full := c.ring.Push(e)
	if full {
		c.s.fail("%s: commit ring is full", c.name)
	}
	if c.s.faulty() && c.s.chance(0.01) {
		c.die() // between the entry and the bell
		return
	}
	if (ring || c.s.chance(0.05)) && !c.rung { // also without need
		c.rung = true
		c.s.report(c.name+" rings", func() { c.rung = false; c.s.r.clientRang(c.sess) })
	}
}

func (c *simClient) commit() {
	s := c.s
	rows := 1
	if s.chance(0.2) {
		rows = 1 + s.rng.IntN(3)
	}
	at, run := -1, 0
	for i := range c.slots {
		if c.slots[i].state != simFree {
			run = 0
		} else if run++; run == rows {
			at = i - rows + 1
			break
		}
	}
	if at < 0 {
		return
	}
	x := &c.slots[at]
	x.gen++
	x.state, x.rows, x.deadline, x.canceled = simCommitted, rows, 0, false
	for i := at + 1; i < at+rows; i++ {
		c.slots[i].state = simPart
	}
	slot := c.sess.first + uint32(at)
	e := shm.Commit{Kind: shm.KindCommit, Level: -1, Rows: uint32(rows), Slot: slot, Gen: x.gen, Committed: s.now}
	if c.poison != harmless && !s.calm {
		s.past[mailed{slot, x.gen}] = &simHistory{poison: c.poison}
	} else if !s.calm && s.poison > 0 && s.chance(s.poison) {
		s.past[mailed{slot, x.gen}] = &simHistory{poison: s.somePoison()}
	}
	if s.chance(0.3) {
		x.deadline = s.now + s.rng.Int64N(int64(20*time.Millisecond))
		e.Deadline = x.deadline
	}
	for i := range rows {
		*s.value(&s.r.layout.Inputs[0], slot+uint32(i)) = stamp(slot, x.gen)
		row := &c.slots[at+i]
		if s.chance(0.05) {
			row.step, row.h = row.step|shm.StepFresh, 0
		}
		s.r.layout.WriteStep(s.r.planes.Bytes(), slot+uint32(i), row.step)
	}
	s.accepted++
	s.note("%s commits slot %d generation %d rows %d", c.name, slot, x.gen, rows)
	c.push(&e)
}

func (c *simClient) cancel() {
	for i := range c.slots {
		if x := &c.slots[i]; x.state == simCommitted && !x.canceled {
			slot := c.sess.first + uint32(i)
			if c.s.chance(0.1) { // a late cancel of a request that has ended
				c.push(&shm.Commit{Kind: shm.KindCancel, Rows: uint32(x.rows), Slot: slot, Gen: x.gen - 1})
				return
			}
			x.canceled = true
			c.s.note("%s cancels slot %d generation %d", c.name, slot, x.gen)
			c.push(&shm.Commit{Kind: shm.KindCancel, Rows: uint32(x.rows), Slot: slot, Gen: x.gen})
			return
		}
	}
}

// look reads the bell first, then the words, as a woken leader does.
func (c *simClient) look() {
	s := c.s
	bell := s.r.board.Bell(c.sess.first)
	if c.asleep && bell.Count.Load() == c.seen {
		return // still parked
	}
	c.seen = bell.Count.Load()
	c.reap()
	c.asleep = true
	for i := range c.slots {
		x := &c.slots[i]
		slot := c.sess.first + uint32(i)
		if x.state != simCommitted {
			continue
		}
		w := s.r.board.Word(slot)
		if w.Generation() != x.gen {
			continue
		}
		s.ended++
		s.note("%s sees slot %d: %v", c.name, slot, w)
		c.check(i, x, w)
		if x.state = simFree; w.Held() {
			x.state = simAbandoned
		} else {
			c.free(i)
		}
	}
}

func (c *simClient) check(at int, x *simSlot, w shm.Word) {
	s, slot := c.s, c.sess.first+uint32(at)
	switch w.Status() {
	case status.OK:
		c.oks++
		for i := range uint32(x.rows) {
			row := &c.slots[at+int(i)]
			want := nextState(row.h, stamp(slot, x.gen))
			if got := *s.value(&s.r.layout.Outputs[0], slot+i); got != want {
				s.fail("%s reads %x, not %x, from slot %d generation %d", c.name, got, want, slot+i, x.gen)
			}
			row.h, row.step = want, row.step&shm.StepOdd^shm.StepOdd // the step is delivered
		}
	case status.ErrExpired:
		if x.deadline == 0 || x.deadline > s.now {
			s.fail("%s: slot %d expired before its deadline", c.name, slot)
		}
	case status.ErrCanceled:
		if !x.canceled {
			s.fail("%s: slot %d was canceled without a cancel", c.name, slot)
		}
	case status.ErrWorkerDied:
		if f := s.past[mailed{slot, x.gen}]; f == nil || f.deaths < s.st.settings.MaxAttempts && f.hangs < maxHangs {
			s.fail("%s: slot %d ended with %v: %+v, %s", c.name, slot, w.Status(), f, s.r.board.Reason(slot))
		}
	case status.ErrFailed, status.ErrInvalid:
		if f := s.past[mailed{slot, x.gen}]; w.Status() == status.ErrFailed && f != nil && (f.left || f.mayFail(s.mild)) {
			return
		}
		s.fail("%s: slot %d ended with %v: %s", c.name, slot, w.Status(), s.r.board.Reason(slot))
	}
}

// reap takes back slots that were held at the end of their request.
func (c *simClient) reap() {
	for i := range c.slots {
		x := &c.slots[i]
		if x.state != simAbandoned {
			continue
		}
		if w := c.s.r.board.Word(c.sess.first + uint32(i)); w.Generation() == x.gen && !w.Held() {
			c.free(i)
		}
	}
}

func (c *simClient) free(at int) {
	for i := at; i < at+c.slots[at].rows; i++ {
		c.slots[i].state = simFree
	}
}

// scribble breaks the protocol: only this client must lose its connection.
func (c *simClient) scribble() {
	s := c.s
	if at := s.rng.IntN(len(c.slots)); s.chance(0.5) && c.slots[at].state == simFree {
		c.lie(uint32(at))
		return
	}
	e := shm.Commit{Kind: shm.CommitKind(s.rng.IntN(4)), Level: int8(s.rng.IntN(256) - 128), Rows: s.rng.Uint32() >> s.rng.IntN(33),
		Slot: s.rng.Uint32() >> s.rng.IntN(33),
		Gen:  s.rng.Uint32() >> s.rng.IntN(33), Deadline: s.rng.Int64() >> s.rng.IntN(64), Committed: -s.rng.Int64() >> s.rng.IntN(64)}
	s.note("%s pushes garbage %+v", c.name, e)
	c.ring.Push(&e)
	c.dead = true // its idea of its slots is worthless from here on
	s.report(c.name+" rings", func() { s.r.clientRang(c.sess) })
	s.report(c.name+" is gone", func() { s.r.clientLeft(c.sess, "simulated") })
}

// lie breaks one rule with an entry that is right otherwise.
func (c *simClient) lie(at uint32) {
	s := c.s
	e := shm.Commit{Kind: shm.KindCommit, Level: -1, Rows: 1, Slot: c.sess.first + at, Gen: c.slots[at].gen + 1, Committed: s.now}
	switch s.rng.IntN(4) {
	case 0:
		e.Gen++ // leaves one out
	case 1:
		e.Rows = uint32(len(c.slots)) - at + 1 // reaches into the next window
	case 2:
		e.Kind = shm.KindCancel // of what never was
	case 3: // a slot in use, unless the first request ends before the broker reads the second
		c.ring.Push(&e)
		e.Gen++
		s.report(c.name+" is gone", func() { s.r.clientLeft(c.sess, "simulated") })
	}
	s.note("%s lies: %+v", c.name, e)
	c.ring.Push(&e)
	c.dead, c.lied = true, true
	s.report(c.name+" rings", func() { s.r.clientRang(c.sess) })
}

func (s *world) quiet() bool {
	for _, c := range s.clients {
		if c.lied && c.sess.isAttached() {
			return false
		}
		if c.dead || !c.sess.isAttached() {
			continue
		}
		for i := range c.slots {
			if c.slots[i].state != simFree {
				return false
			}
		}
	}
	return true
}

// unfinished sums up the remaining requests. The trace of a replay has the rest.
func (s *world) unfinished() string {
	return fmt.Sprintf("slots by state %v, queued %d, held %d, %d events", s.r.rows, s.st.batcher.Queued(), s.r.held, len(s.events))
}

// books checks that nothing is left when all clients are gone.
func (s *world) books() {
	for i := range s.r.layout.Slots {
		if s.r.books[i/chunkSlots] == nil {
			continue
		}
		if x := s.r.slot(uint32(i)); x.state != idle {
			s.fail("slot %d is %v at the end", i, x.state)
		}
	}
	if n := len(s.r.troubles); n != 0 {
		s.fail("the histories of %d requests are left at the end", n)
	}
	if s.r.held != 0 || len(s.r.clients) != 0 || s.st.batcher.Queued() != 0 {
		s.fail("%d held, %d clients, %d queued at the end", s.r.held, len(s.r.clients), s.st.batcher.Queued())
	}
	if free := s.r.windows.free; free != s.r.layout.Slots {
		s.fail("%d of %d slots are free at the end", free, s.r.layout.Slots)
	}
	if n := len(s.r.windows.gaps); n != 1 {
		s.fail("the free slots are in %d parts at the end", n)
	}
	if s.r.rows != [4]int{idle: s.r.layout.Slots} {
		s.fail("slots by state are %v at the end", s.r.rows)
	}
	var ends uint64
	for _, n := range s.st.stats.byStatus {
		ends += n
	}
	if ends != s.st.stats.requests {
		s.fail("%d requests were accepted, %d ends counted", s.st.stats.requests, ends)
	}
}
