// SPDX-License-Identifier: Apache-2.0

package client

import (
	"math/bits"
	"slices"
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
// The link keeps the window's free slots in private memory: no other process claims
// from this window. refs counts the claimed requests, plus one for the client; at zero
// the segments are unmapped, so a view never dangles. In a retired link the constant
// retired stands for the client: no new claim, and the last Release hangs up.
type link struct {
	session *attach.Session
	info    *Model
	again   chan struct{} // holds one value while the broker wants the client to attach again
	gone    chan struct{} // closed when the connection ended
	board   *shm.Board
	bell    *shm.Bell
	first   uint32 // first slot of the window
	refs    atomic.Int64
	dead    atomic.Bool  // the broker went away, or the client was closed
	timing  bool         // measure Claim and Write
	woke    atomic.Int64 // last wake-up from the bell, on Now's clock

	mu        sync.Mutex
	commits   shm.Producer[shm.Commit]
	times     shm.ClientTimes
	slots     []slot
	gens      []uint32 // generation of the last commit, by slot
	free      []uint64 // bitmap: 1 = free
	lowest    int      // words of free below this one are 0
	nfree     int
	kept      int        // by sequences
	abandoned []uint32   // released while a worker or the broker still uses them
	line      []*claimer // see line.go
	wait      waiting
}

type slotState uint8

// States of a slot as its client sees them:
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
	cost   uint16 // of a row; 0: by its size
	held   bool   // a worker may still write; set together with status
	kept   bool   // by a Sequence: Release does not give the slot back
	told   bool   // the caller knows that the request ended well
	traced bool   // the broker records requests and reads their times
	stream bool   // the caller takes parts; parts has more
	parts  parts
	cancel bool // a cancel was sent to the broker
	rows   uint32
	status status.Code // once ended
	dims   [tensor.MaxVariableDims]uint32

	claimTook, claimed, committed, seen int64 // on Now's clock
	deadline                            int64 // set by SetDeadline; 0 if none
	ends                                int64 // deadline plus endGrace; 0 if it has none
}

func newLink(s *attach.Session) (*link, error) {
	n := s.Info.Window
	// Touch the window's pages now: a refusal is an error here and not a SIGBUS later,
	// and no request pays for page faults.
	var window []shm.Range
	planes := slices.Concat(s.Layout.Inputs, s.Layout.Outputs, s.Layout.State)
	if s.Layout.Step != nil {
		planes = append(planes, *s.Layout.Step)
	}
	for _, p := range planes {
		if !p.Spec.OnDevice() {
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

// maxRows is the most rows of a request.
func maxRows(a *control.Attached) int {
	if a.MaxRows > 0 {
		return min(a.MaxRows, a.MaxBatch)
	}
	return a.MaxBatch
}

func (l *link) hold() { l.refs.Add(1) }

// tryHold is hold for a link that may be closed already.
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
		l.hangUp() // watch returns
	}
}

// hangUp gives the window back. No request may use its slots.
func (l *link) hangUp() {
	l.commits.Leave()
	l.session.HangUp()
}

func (l *link) close() {
	l.commits.Leave()
	l.session.Close()
}

// retired is more than the requests of any window.
const retired = 1 << 40

// retire drops the client's hold and refuses new ones.
func (l *link) retire() {
	if l.refs.Add(retired-1) == retired {
		l.hangUp()
	}
	l.mu.Lock()
	l.wakeClaims()
	l.mu.Unlock()
}

// unretire unmaps the segments of a retired link, or leaves that to its last request.
func (l *link) unretire() {
	if l.refs.Add(-retired) == 0 {
		l.close()
	}
}

// watch reads the broker's notices until the connection ends.
func (l *link) watch() {
	l.session.Watch(func() {
		select {
		case l.again <- struct{}{}:
		default:
		}
	})
	close(l.gone)
}

// fail ends all requests in flight: no answer will come.
func (l *link) fail() {
	l.dead.Store(true)
	l.mu.Lock()
	l.wakeClaims()
	l.mu.Unlock()
	l.kick()
	l.wakeFollowers()
}

// take claims consecutive free slots, lowest first: low slots are warm in the caches,
// and neighbours in time become neighbours in memory. The caller holds mu.
func (l *link) take(rows int) (int, bool) {
	at := l.find(rows)
	if at < 0 {
		return 0, false
	}
	for i := at; i < at+rows; i++ {
		l.free[i/64] &^= 1 << (i % 64)
	}
	l.nfree -= rows
	return at, true
}

// find returns the first of rows consecutive free slots, or -1.
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

// giveBack frees slots. Call serveLine afterwards. The caller holds mu.
func (l *link) giveBack(at, rows int) {
	for i := at; i < at+rows; i++ {
		l.free[i/64] |= 1 << (i % 64)
	}
	l.lowest = min(l.lowest, at/64)
	l.nfree += rows
}

// reapAbandoned frees released slots that no worker uses any more. The caller holds mu.
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
		// Cannot happen while both sides keep the protocol: the ring has room for every
		// entry of a window.
		panic("ringbatch: commit ring is full")
	}
	return ring
}

// hasEnded reads from the board whether the request in slot i has ended, and keeps its
// status. The first status counts, even if the broker dies between two looks.
func (l *link) hasEnded(i uint32) bool {
	s := &l.slots[i]
	if s.state != slotCommitted {
		return true
	}
	w := l.board.Word(l.first + i)
	switch {
	case w.Generation() == l.gens[i]:
		s.status, s.held = w.Status(), w.Held()
		if !s.status.Valid() { // written by a broken worker
			s.status = status.ErrProtocol
		}
	case l.dead.Load():
		s.status, s.held = status.ErrBrokerGone, true
	case s.ends != 0 && shm.Now() >= s.ends: // the broker does not run
		s.status, s.held = status.ErrExpired, true // until the broker ends it, too
	default:
		return false
	}
	s.state = slotEnded
	// One wake-up ends many requests: the woken goroutine has read the clock.
	if s.seen = l.woke.Load(); s.seen < s.committed { // it ended before anyone waited
		s.seen = shm.Now()
	}
	if s.traced {
		l.times.Of(i, l.gens[i]).Woken.Store(s.seen)
	}
	return true
}
