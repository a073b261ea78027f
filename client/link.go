// SPDX-License-Identifier: Apache-2.0

package client

import (
	"math/bits"
	"sync"
	"sync/atomic"

	"github.com/ringbatch/ringbatch/internal/attach"
	"github.com/ringbatch/ringbatch/internal/control"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

// link is one attachment: one epoch of the broker, one window of slots.
//
// The window's free slots are kept here, privately: no other process claims
// from it. refs counts the claimed requests plus one for the client; the
// segments are unmapped when it falls to zero, so a view never dangles. A link
// that is retired has the number retired instead of the client's one: nobody
// claims from it any more, and it hangs up when its last request is released.
type link struct {
	session *attach.Session
	info    *Model
	again   chan struct{} // has one while the broker wants the client to attach again
	gone    chan struct{} // closed when the connection has ended
	board   *shm.Board
	bell    *shm.Bell
	first   uint32 // first slot of the window
	refs    atomic.Int64
	dead    atomic.Bool  // the broker went away, or the client was closed
	timing  bool         // measure Claim and Write
	woke    atomic.Int64 // when somebody last woke from the bell, on Now's clock

	mu        sync.Mutex
	commits   shm.Producer[shm.Commit]
	times     shm.ClientTimes
	slots     []slot
	gens      []uint32 // generation of the last commit, by slot
	free      []uint64 // bitmap: 1 = free
	lowest    int      // no word of free below this one has a bit set
	nfree     int
	abandoned []uint32      // released while a worker or the broker still has them
	room      chan struct{} // closed when Claim should look again; nil if nobody waits
	wait      waiting
}

type slotState uint8

// A slot as its client sees it:
//
//	free ── Claim ──► claimed ── Commit ──► committed ── word on the board ──► ended
//	 ▲                   │                      │                               │
//	 └──── Release ──────┴── Release (cancel, abandoned until the word) ─ Release
const (
	slotFree slotState = iota
	slotClaimed
	slotCommitted
	slotEnded
	slotAbandoned
)

type slot struct {
	handle atomic.Uint32 // +1 at every claim and release: a stale Request no longer matches
	state  slotState
	level  int8
	held   bool // a worker may still write; decided together with status
	traced bool // the broker records, and wants to know its times
	cancel bool // the broker was told to cancel it
	rows   uint32
	status status.Code // once ended
	dims   [tensor.MaxVariableDims]uint32

	claimTook, claimed, committed, seen int64 // on Now's clock
	deadline                            int64 // of its own, 0 if none
	ends                                int64 // not later than then: its deadline and endGrace; 0 if it has none
}

func newLink(s *attach.Session) (*link, error) {
	n := s.Info.Window
	// Touch the window's pages now: a refusal is an error here instead of a
	// SIGBUS later, and no request pays for page faults.
	var window []shm.Range
	for _, planes := range [][]shm.Plane{s.Layout.Inputs, s.Layout.Outputs} {
		for _, p := range planes {
			window = append(window, shm.Range{Offset: p.Offset + int64(s.Info.FirstSlot)*p.Stride, Length: int64(n) * p.Stride})
		}
	}
	if err := s.Planes.Populate(window...); err != nil {
		return nil, err
	}
	l := &link{
		session: s,
		again:   make(chan struct{}, 1),
		gone:    make(chan struct{}),
		board:   s.Board,
		bell:    s.Board.Bell(s.Info.FirstSlot),
		first:   s.Info.FirstSlot,
		commits: shm.Producer[shm.Commit]{Ring: shm.CommitRing(s.Words, n)},
		slots:   make([]slot, n),
		gens:    make([]uint32, n),
		free:    make([]uint64, (n+63)/64),
		nfree:   n,
	}
	if s.Info.Times {
		l.times = shm.NewClientTimes(s.Words, n)
	}
	for i := range n {
		l.gens[i] = s.Info.FirstGen
		l.free[i/64] |= 1 << (i % 64)
	}
	l.info = l.model()
	l.wait.init(n)
	l.refs.Store(1)
	return l, nil
}

func (l *link) model() *Model {
	a := &l.session.Info
	return &Model{
		Name: a.Model, Signature: l.session.Layout.Signature, MaxBatchSize: maxRows(a), Window: a.Window,
		WaitTime: l.session.Settings.WaitTime, Levels: l.session.Settings.LevelCount(), Slots: a.Slots,
	}
}

// maxRows is the most that a request may have.
func maxRows(a *control.Attached) int {
	if a.MaxRows > 0 {
		return min(a.MaxRows, a.MaxBatch)
	}
	return a.MaxBatch
}

func (l *link) hold() { l.refs.Add(1) }

// tryHold is hold for a link that may be gone already.
func (l *link) tryHold() bool {
	for n := l.refs.Load(); n > 0 && n < retired; n = l.refs.Load() {
		if l.refs.CompareAndSwap(n, n+1) {
			return true
		}
	}
	return false
}

func (l *link) drop() {
	switch l.refs.Add(-1) {
	case 0:
		l.close()
	case retired:
		l.hangUp() // watch notices
	}
}

// hangUp gives the window back; nobody uses its slots any more.
func (l *link) hangUp() {
	l.commits.Leave()
	l.session.HangUp()
}

func (l *link) close() {
	l.commits.Leave()
	l.session.Close()
}

// retired is more than a window can have requests.
const retired = 1 << 40

// retire takes the client's own hold off, and lets nobody else get one.
func (l *link) retire() {
	if l.refs.Add(retired-1) == retired {
		l.hangUp()
	}
}

// unretire is the end of a retired link: the segments go, or with its last
// request.
func (l *link) unretire() {
	if l.refs.Add(-retired) == 0 {
		l.close()
	}
}

// watch notes what the broker says until the connection ends.
func (l *link) watch() {
	l.session.Watch(func() {
		select {
		case l.again <- struct{}{}:
		default:
		}
	})
	close(l.gone)
}

// fail ends everything in flight: nobody will answer it any more.
func (l *link) fail() {
	l.dead.Store(true)
	l.mu.Lock()
	l.wakeClaims()
	l.mu.Unlock()
	l.kick()
	l.wakeFollowers()
}

// take claims rows consecutive free slots, lowest first: the slots used last
// are the warmest, and neighbours in time become neighbours in memory. The
// caller holds mu.
func (l *link) take(rows int) (int, bool) {
	at := l.find(rows)
	if at < 0 && len(l.abandoned) > 0 {
		l.reapAbandoned()
		at = l.find(rows)
	}
	if at < 0 {
		return 0, false
	}
	for i := at; i < at+rows; i++ {
		l.free[i/64] &^= 1 << (i % 64)
	}
	l.nfree -= rows
	return at, true
}

// find looks for rows consecutive free slots; -1 if there are none.
func (l *link) find(rows int) int {
	if l.nfree < rows {
		return -1
	}
	if rows == 1 {
		for w := l.lowest; w < len(l.free); w++ {
			if l.free[w] != 0 {
				l.lowest = w
				return w*64 + bits.TrailingZeros64(l.free[w])
			}
		}
		return -1
	}
	run := 0
	for i := l.lowest * 64; i < len(l.slots); i++ {
		if l.free[i/64]&(1<<(i%64)) == 0 {
			run = 0
			continue
		}
		if run++; run == rows {
			return i - rows + 1
		}
	}
	return -1
}

// giveBack frees slots and lets those who wait for some try again. The caller
// holds mu.
func (l *link) giveBack(at, rows int) {
	for i := at; i < at+rows; i++ {
		l.free[i/64] |= 1 << (i % 64)
	}
	l.lowest = min(l.lowest, at/64)
	l.nfree += rows
	l.wakeClaims()
}

// wakeClaims lets everybody who waits in Claim look again. The caller holds
// mu.
func (l *link) wakeClaims() {
	if l.room != nil {
		close(l.room)
		l.room = nil
	}
}

// reapAbandoned frees released slots whose word says that nobody else has
// them any more. The caller holds mu.
func (l *link) reapAbandoned() {
	keep := l.abandoned[:0]
	for _, at := range l.abandoned {
		if w := l.board.Word(l.first + at); w.Generation() == l.gens[at] && !w.Held() {
			l.slots[at].state = slotFree
			l.giveBack(int(at), int(l.slots[at].rows))
		} else {
			keep = append(keep, at)
		}
	}
	l.abandoned = keep
}

// push sends one entry to the broker. The caller holds mu.
func (l *link) push(e *shm.Commit) (ring bool) {
	ring, full := l.commits.Push(e)
	if full {
		// Cannot happen while both sides keep the protocol: the ring has room
		// for everything that a window can have under way.
		panic("ringbatch: commit ring is full")
	}
	return ring
}

// ended looks at the board whether the request in slot i has ended, and if so
// fixes its status: what was seen first counts, also when the broker dies
// between two looks.
func (l *link) ended(i uint32) bool {
	s := &l.slots[i]
	if s.state != slotCommitted {
		return true
	}
	w := l.board.Word(l.first + i)
	switch {
	case w.Generation() == l.gens[i]:
		s.status, s.held = w.Status(), w.Held()
		if !s.status.Valid() { // a damaged worker wrote it
			s.status = status.ErrProtocol
		}
	case l.dead.Load():
		s.status, s.held = status.ErrBrokerGone, true
	case s.ends != 0 && shm.Now() >= s.ends: // the broker stands still
		s.status, s.held = status.ErrExpired, true // until the broker says so too
	default:
		return false
	}
	s.state = slotEnded
	// Woken once for many: the clock was read by the one who woke.
	if s.seen = l.woke.Load(); s.seen < s.committed { // nobody had to wait
		s.seen = shm.Now()
	}
	if s.traced {
		l.times.Of(i, l.gens[i]).Woken.Store(s.seen)
	}
	return true
}
