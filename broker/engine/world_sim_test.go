// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"fmt"
	"log/slog"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

// host is one simulated run: some loops of a broker on a simulated clock, and a
// world for each ring. Nothing in it depends on real time or on a goroutine, so
// a seed replays exactly.
type host struct {
	rng    *rand.Rand
	now    int64
	loops  []*Loop
	worlds []*world
	calm   bool    // no more faults: everything must come to an end
	mild   bool    // no faults but functions that raise
	still  int64   // when the whole machine last stood still
	poison float64 // the share of poisonous requests
	peers  uint64
	trace  []string
}

// world is one ring of a host, and peers that act in the seed's order.
type world struct {
	*host
	l       *Loop
	name    string
	users   int  // sessions of the ring
	dynamic bool // the ring goes with its last session
	gone    bool // the last session has ended
	r       *Ring
	st      *Stage
	clients []*simClient
	workers []*simWorker
	events  []*event // that the kernel will report to the broker, in any order
	words   []shm.Word
	leased  []int                  // how often each slot's window was leased, to know a Reset
	used    []uint32               // the latest generation of each slot that a worker had
	past    map[mailed]*simHistory // of requests that workers have taken

	accepted, ended int
}

// event is a doorbell, a death or a hang-up under way to the broker.
type event struct {
	at   int64
	what string
	f    func()
}

// violation is the panic of a broken promise.
type violation string

func (s *host) fail(format string, a ...any) { panic(violation(fmt.Sprintf(format, a...))) }

// note keeps a line of the trace, if a seed is replayed.
func (s *host) note(format string, a ...any) {
	if *simSeed == 0 {
		return
	}
	if len(s.trace) > 4000 {
		s.trace = s.trace[2000:]
	}
	s.trace = append(s.trace, fmt.Sprintf("%9d µs  ", s.now/1000)+fmt.Sprintf(format, a...))
}

// faulty says that peers may die, hang, leave and lie.
func (s *host) faulty() bool { return !s.calm && !s.mild }

func (s *host) chance(p float64) bool { return s.rng.Float64() < p }

func newHost(seed int64, loops, rings int) (*host, error) {
	h := &host{rng: rand.New(rand.NewPCG(uint64(seed), 7)), now: int64(time.Hour)}
	for i := range loops {
		l, err := NewLoop(i, h)
		if err != nil {
			return nil, err
		}
		l.now, l.clock = h.now, func() int64 { return h.now }
		h.loops = append(h.loops, l)
	}
	for range rings {
		if err := h.addWorld(); err != nil {
			return nil, err
		}
	}
	return h, nil
}

// newWorld is a host with one ring.
func newWorld(t testing.TB, seed int64) *world {
	t.Helper()
	h, err := newHost(seed, 1, 1)
	must.Do(t, err)
	t.Cleanup(h.close)
	return h.worlds[0]
}

// newModel is a host without faults and with one ring of that policy.
func newModel(t testing.TB, p policy.Policy) *world {
	t.Helper()
	h, err := newHost(1, 1, 0)
	must.Do(t, err)
	t.Cleanup(h.close)
	h.calm = true
	return h.mustAdd(t, p)
}

func (h *host) mustAdd(t testing.TB, p policy.Policy) *world {
	t.Helper()
	s, err := h.add(p)
	must.Do(t, err)
	return s
}

// addWorld makes a ring whose size and policy the seed chooses.
func (h *host) addWorld() error {
	p := policy.New(policy.Slots(8+h.rng.IntN(9)), policy.MaxBatchSize(1+h.rng.IntN(6)),
		policy.WaitTime(time.Duration(h.rng.IntN(3000))*time.Microsecond), policy.PreserveOrder(h.chance(0.2)))
	if h.chance(0.3) {
		p = policy.New(policy.MaxQueue(1+h.rng.IntN(8)).At(0), policy.DefaultTimeout(time.Duration(1+h.rng.IntN(8))*time.Millisecond).At(1),
			policy.OnTimeout(policy.Action(h.rng.IntN(2))).At(1), policy.DefaultPriority(h.rng.IntN(2))).Over(p)
	}
	lease := time.Duration(5+h.rng.IntN(20)) * time.Millisecond // shorter than a policy allows: no process is ever off its core here
	s, err := h.add(p)
	if err == nil {
		s.st.settings.Lease = lease
		s.dynamic = h.chance(0.5)
	}
	return err
}

// add makes a ring whose rows are one number each. Each slot is a sequence, whose state
// is a hash of its inputs.
func (h *host) add(p policy.Policy) (*world, error) {
	sig := tensor.Signature{
		Inputs:  []tensor.Spec{{Name: "x", DType: tensor.I64, Shape: []int{1}}},
		Outputs: []tensor.Spec{{Name: "y", DType: tensor.I64, Shape: []int{1}}},
		State:   []tensor.Spec{{Name: "h", DType: tensor.I64, Shape: []int{1}}},
	}
	settings, err := p.Resolve(sig.Inputs)
	if err != nil {
		return nil, err
	}
	layout, err := shm.NewLayout(sig, settings.Slots, settings.MaxBatchSize)
	if err != nil {
		return nil, err
	}
	s := &world{host: h, name: fmt.Sprintf("sim%d", len(h.worlds)), past: map[mailed]*simHistory{}}
	s.r, err = NewRing(&RingSpec{
		Name: s.name, Layout: layout, Create: shm.CreateUnshared, Epoch: 1, UserShare: 100, Log: slog.New(slog.DiscardHandler),
		SessionEnded: s.leave, Stages: []StageSpec{{Name: s.name, Settings: settings, Layout: layout}},
	})
	if err != nil {
		return nil, err
	}
	s.l, s.st = h.loops[len(h.worlds)%len(h.loops)], s.r.stages[0]
	s.r.SetLoop(s.l)
	s.l.AdoptRing(s.r)
	s.words = make([]shm.Word, s.r.layout.Slots)
	s.leased = make([]int, s.r.layout.Slots)
	s.used = make([]uint32, s.r.layout.Slots)
	h.worlds = append(h.worlds, s)
	return s, nil
}

// leave ends a session as package broker does.
func (s *world) leave() {
	if s.users--; s.users == 0 && s.dynamic {
		s.gone = true
		s.l.Post(func() { s.l.ForgetRing(s.r) })
	}
}

// The host is the Outside of the loops.

func (h *host) Offended(Process)                 {}
func (h *host) WorkerCame(int, []int, bool) bool { return false }
func (h *host) WorkerLeft(int, bool, bool) bool  { return false }
func (h *host) WorkerFailed(int) bool            { return false }
func (h *host) Promoted(int, int)                {}

func (h *host) close() {
	for _, l := range h.loops {
		l.ReleaseRings()
		l.Close()
	}
}

// forgotten says that the ring is gone, with its last peer.
func (s *world) forgotten() bool { return s.r.closed }

// noPid is larger than any pid of Linux.
const noPid = 1 << 30

type noConn struct{}

func (noConn) Close() error { return nil }

// peer makes a connection to no process.
func (s *world) peer(name string) *Peer {
	s.peers++
	return NewPeer(noConn{}, noPid, 0, Process{Inode: s.peers}, -1, name)
}

// report has the kernel report something to the broker, after a while.
func (s *world) report(what string, f func()) {
	delay := int64(0)
	if s.chance(0.7) {
		delay = s.rng.Int64N(int64(2 * time.Millisecond))
	}
	s.events = append(s.events, &event{s.now + delay, what, f})
}

// round is one round of a loop: each of its rings gets some of the due events, in any
// order, then the round settles.
func (h *host) round(l *Loop) {
	l.beginRound()
	for _, s := range h.worlds {
		if s.l == l {
			s.deliver()
		}
	}
	var given map[*simWorker]uint64
	for _, s := range h.worlds {
		for _, w := range s.workers {
			if w.sess.state != workerGone && w.givenUp() {
				if given == nil {
					given = map[*simWorker]uint64{}
				}
				given[w] = w.sess.posted
			}
		}
	}
	l.settleRound()
	for _, s := range h.worlds {
		s.watchWords()
		if s.l == l && !s.forgotten() {
			s.watchBooks()
		}
	}
	for w, posted := range given {
		if w.sess.posted != posted && w.givenUp() { // else it is back from quarantine
			h.fail("%s gets a batch after it was given up", w.name)
		}
	}
}

// watchBooks checks that a loop is late for nothing after its round, and has overlooked
// nothing that it has read.
func (s *world) watchBooks() {
	for _, w := range s.workers {
		if !w.lied || w.sess.faults.has(brokeProtocol) || w.sess.state == workerGone {
			continue
		}
		if n, err := w.sess.done.Pending(); n == 0 && err == nil {
			s.fail("%s was done with a batch that it did not have, and nothing follows", w.name)
		}
	}
	for _, w := range s.st.busy {
		if w.state == workerAwaited && s.l.now >= w.deathDue {
			s.fail("%s had its time to turn out dead, and nothing follows", w.Name)
		}
		if !w.state.isGivenUp() && !w.faults.has(brokeProtocol) && s.l.now >= s.st.leaseOf(w) {
			s.fail("%s outlives its lease", w.Name)
		}
		for _, p := range w.mails {
			for _, q := range p.requests {
				info := s.r.slot(q.head)
				due := info.commit.Deadline
				if s.r.stillHas(q, p.batch) && info.state == running && due > 0 && due <= s.l.now {
					s.fail("slot %d runs beyond its deadline", q.head)
				}
			}
		}
	}
}

func (s *world) deliver() {
	var later []*event
	s.rng.Shuffle(len(s.events), func(i, j int) { s.events[i], s.events[j] = s.events[j], s.events[i] })
	due := s.events
	s.events = nil
	for _, e := range due {
		if e.at > s.now || !s.calm && s.chance(0.2) {
			later = append(later, e)
			continue
		}
		s.note("broker: %s", e.what)
		e.f()
		s.watchWords()
	}
	s.events = append(later, s.events...)
}

// watchWords checks that every generation ends once: a word only moves to a
// later generation, or loses its held mark.
func (s *world) watchWords() {
	if s.forgotten() {
		return // its board is gone
	}
	for i := range s.words {
		was, is := s.words[i], s.r.board.Word(uint32(i))
		if was == is {
			continue
		}
		s.words[i] = is
		d := int32(is.Generation() - was.Generation())
		if d < 0 || d == 0 && (was.Status() != is.Status() && s.leased[i] == 0 || is.Held() && !was.Held()) {
			s.fail("slot %d went from %v to %v", i, was, is)
		}
		s.leased[i] = 0
	}
}

// Kill is the broker's SIGKILL.
func (h *host) Kill(p *Peer, _ bool) error {
	for _, s := range h.worlds {
		for _, w := range s.workers {
			if w.sess.Peer != p {
				continue
			}
			if w.unkillable {
				return fmt.Errorf("not permitted")
			}
			s.note("%s is sent SIGKILL", p.Name)
			w.mayBeKilled()
			w.killed = true
			return nil
		}
	}
	h.fail("the broker kills a process that is no worker")
	return nil
}

// attach begins a client's session as a connection does.
func (s *world) attach(name string, window int) (*ClientSession, error) {
	p := s.peer(name)
	if err := s.join(); err != nil {
		return nil, err
	}
	err := s.r.openClient(p, window, false)
	if err == nil {
		var c *ClientSession
		if c, err = s.r.reserveWindow(p, window, newBooks(window)); err == nil {
			c.resetWindow()
			if err = s.r.attachClient(c); err == nil {
				return c, nil
			}
			s.r.takeBackWindow(c)
		}
		p.Discard()
	}
	s.leave()
	return nil, err
}

// join has a session keep the ring, if the ring is not gone.
func (s *world) join() error {
	if s.gone {
		return status.ErrUnknownModel
	}
	s.users++
	return nil
}

func (s *world) attachClient() {
	window := 1 + s.rng.IntN(min(6, s.r.layout.Slots))
	s.l.now = s.now
	name := fmt.Sprintf("client%d of %s", len(s.clients), s.name)
	sess, err := s.attach(name, window)
	if err != nil {
		return // no room
	}
	c := &simClient{s: s, name: name, sess: sess, slots: make([]simSlot, window),
		ring: shm.Producer[shm.Commit]{Ring: shm.CommitRing(sess.seg, window)}, garbage: s.faulty() && s.chance(0.05)}
	for i := range c.slots {
		c.slots[i].gen, c.slots[i].step = sess.before, shm.StepFresh
		if at := int(sess.first) + i; int32(sess.before-s.used[at]) < 0 {
			s.fail("%s begins with generation %d of slot %d, whose last owner had %d", name, sess.before, at, s.used[at])
		}
		s.leased[int(sess.first)+i]++
		s.words[int(sess.first)+i] = s.r.board.Word(sess.first + uint32(i))
	}
	s.clients = append(s.clients, c)
	s.note("%s attaches, window %d+%d", name, sess.first, window)
	s.l.settleRound()
}

func (s *world) attachWorker() {
	s.l.now = s.now
	if s.join() != nil {
		return // the ring goes with its last session
	}
	name := fmt.Sprintf("worker%d of %s", len(s.workers), s.name)
	depth := 1 + s.rng.IntN(3)
	p, info := s.peer(name), WorkerInfo{Depth: depth, Lanes: s.rng.IntN(depth + 1), Share: 1}
	if err := s.st.openWorker(p, &info); err != nil {
		s.fail("open worker: %v", err)
	}
	sess, err := s.st.attachWorker(p, info)
	if err != nil {
		s.fail("attach worker: %v", err)
	}
	w := &simWorker{s: s, name: name, sess: sess, box: shm.NewMailbox(sess.seg, depth, s.r.layout.MaxBatch),
		done:       shm.Producer[shm.Done]{Ring: shm.DoneRing(sess.seg, depth)},
		unkillable: s.faulty() && s.chance(0.2), garbage: s.faulty() && s.chance(0.05)}
	s.workers = append(s.workers, w)
	s.note("%s attaches, depth %d, lanes %d", name, depth, info.Lanes)
	s.l.settleRound()
}

func (s *world) liveWorkers() (n int) {
	for _, w := range s.workers {
		if !w.dead && w.sess.state != workerGone {
			n++
		}
	}
	return n
}

func (s *world) liveClients() (n int) {
	for _, c := range s.clients {
		if !c.dead && c.sess.isAttached() {
			n++
		}
	}
	return n
}

// step lets a peer act, and time pass.
func (s *world) step() {
	if s.chance(0.7) {
		s.now += s.rng.Int64N(int64(200 * time.Microsecond))
	}
	switch k := s.rng.IntN(10); {
	case k < 5 && len(s.clients) > 0:
		s.clients[s.rng.IntN(len(s.clients))].act()
	case k < 9 && len(s.workers) > 0:
		s.workers[s.rng.IntN(len(s.workers))].act()
	}
	if due := s.l.timers.nextDue(); due != never && s.calm && s.r.rows[running]+s.r.rows[held] == 0 && s.chance(0.01) {
		s.now = max(s.now, due) // a client in debt waits for its turn
	}
	s.watchWords()
	if s.chance(0.3) || s.l.timers.nextDue() <= s.now || len(s.l.waiting) > 0 {
		s.round(s.l)
	}
}

// run plays a seed to its end and checks the promises.
func (h *host) run() {
	h.poison = 0.02
	for _, s := range h.worlds {
		if h.chance(0.3) { // generations wrap around
			s.r.base = -uint32(h.rng.IntN(8))
			for i := range s.used {
				s.used[i] = s.r.base
			}
		}
		s.attachWorker()
		s.attachClient()
	}
	for range (100 + h.rng.IntN(900)) * len(h.worlds) {
		s := h.worlds[h.rng.IntN(len(h.worlds))]
		if s.forgotten() {
			if len(h.worlds) == 1 {
				return // its last peer left
			}
			continue
		}
		if s.liveClients() < 3 && s.chance(0.1) {
			s.attachClient()
		}
		if s.liveWorkers() < 2 && s.chance(0.1) {
			s.attachWorker()
		}
		if h.chance(0.0005) {
			h.note("the machine stands still")
			h.now += int64(deathTime) + h.rng.Int64N(int64(time.Second))
			h.still = h.now
		}
		s.step()
	}
	h.calm = true
	h.note("from here on without faults")
	for _, s := range h.worlds {
		s.finish()
	}
}

// finish lets all requests end without faults, and checks that nothing is left.
func (s *world) finish() {
	for i := 0; !s.quiet(); i++ {
		if s.forgotten() {
			return
		}
		if i == 20000 {
			s.fail("does not come to an end: %s", s.unfinished())
		}
		if s.liveWorkers() == 0 {
			s.attachWorker()
		}
		s.step()
	}
	for _, c := range s.clients {
		if !c.dead && c.sess.isAttached() {
			c.leave("closes")
		}
	}
	for i := 0; len(s.events) > 0 || s.r.held > 0 || s.st.batcher.Queued() > 0; i++ {
		if i == 20000 {
			s.fail("does not come to an end after the clients left: %s", s.unfinished())
		}
		s.step()
	}
	if s.forgotten() {
		return
	}
	s.st.touch()
	s.round(s.l)
	s.books()
}
