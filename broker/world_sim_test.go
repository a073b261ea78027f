package broker

import (
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"time"

	"github.com/ringbatch/ringbatch/broker/batcher"
	"github.com/ringbatch/ringbatch/broker/supervise"
	"github.com/ringbatch/ringbatch/internal/control"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/tensor"
)

// world is one simulated run: the real core of a broker on a clock of our
// own, and peers that act in the order that a seed chooses. Nothing in it
// depends on real time or on a goroutine, so a seed replays exactly.
type world struct {
	rng     *rand.Rand
	now     int64
	b       *Broker
	m       *model
	clients []*simClient
	workers []*simWorker
	events  []*event // what the kernel will tell the broker, in any order
	calm    bool     // no more faults: everything must come to an end
	words   []shm.Word
	leased  []int // how often each slot's window was leased, to know a Reset

	accepted, ended int
	trace           []string
}

// event is a doorbell, a death or a hang-up under way to the broker.
type event struct {
	at   int64
	what string
	f    func()
}

// violation is what a broken promise panics with.
type violation string

func (s *world) fail(format string, a ...any) { panic(violation(fmt.Sprintf(format, a...))) }

func (s *world) note(format string, a ...any) {
	if len(s.trace) > 4000 {
		s.trace = s.trace[2000:]
	}
	s.trace = append(s.trace, fmt.Sprintf("%9d µs  ", s.now/1000)+fmt.Sprintf(format, a...))
}

func (s *world) chance(p float64) bool { return s.rng.Float64() < p }

func newWorld(seed int64) (*world, error) {
	s := &world{rng: rand.New(rand.NewPCG(uint64(seed), 7)), now: int64(time.Hour)}
	cfg := Config{Socket: "simulated", Memory: shm.NewHeap(), Logger: slog.New(slog.DiscardHandler)}
	cfg.fill()
	s.b = &Broker{cfg: cfg, log: cfg.Logger, super: supervise.New(cfg.Logger, cfg.Socket), epoch: 1, started: time.Now(), now: s.now, models: map[string]*model{}, stopped: make(chan struct{}),
		clock: func() int64 { return s.now }, killPeer: s.kill}
	var err error
	if s.b.loop, err = newLoop(); err != nil {
		return nil, err
	}
	mc := ModelConfig{Name: "sim", Slots: 8 + s.rng.IntN(9), Lease: time.Duration(5+s.rng.IntN(20)) * time.Millisecond, Signature: tensor.Signature{
		Inputs:  []tensor.Spec{{Name: "x", DType: tensor.I64, Shape: []int{1}}},
		Outputs: []tensor.Spec{{Name: "y", DType: tensor.I64, Shape: []int{1}}},
	}}
	mc.Policy = batcher.Config{MaxBatchSize: 1 + s.rng.IntN(6), WaitTime: time.Duration(s.rng.IntN(3000)) * time.Microsecond, PreserveOrder: s.chance(0.2)}
	if s.chance(0.3) {
		mc.Policy.Levels = []batcher.LevelPolicy{{MaxQueue: 1 + s.rng.IntN(8)}, {DefaultTimeout: time.Duration(1+s.rng.IntN(8)) * time.Millisecond, OnTimeout: batcher.TimeoutAction(s.rng.IntN(2))}}
		mc.Policy.DefaultLevel = s.rng.IntN(2)
	}
	if s.m, err = s.b.newModel(mc); err != nil {
		return nil, err
	}
	s.m.dynamic = s.chance(0.5)
	s.b.models[mc.Name] = s.m
	s.words = make([]shm.Word, s.m.layout.Slots)
	s.leased = make([]int, s.m.layout.Slots)
	return s, nil
}

func (s *world) close() {
	for _, m := range s.b.models {
		for c := range m.clients {
			c.close(s.b)
		}
		for _, w := range m.workers {
			if w != nil {
				w.close(s.b)
			}
		}
		m.close()
	}
	s.b.loop.close()
}

// peer makes a connection that leads nowhere.
func (s *world) peer(name string) *peer {
	return &peer{conn: &net.UnixConn{}, pid: 1, name: name, pidfd: -1, doorbell: -1, watches: [2]int32{-1, -1}}
}

// tell has the kernel tell the broker something, after a while.
func (s *world) tell(what string, f func()) {
	delay := int64(0)
	if s.chance(0.7) {
		delay = s.rng.Int64N(int64(2 * time.Millisecond))
	}
	s.events = append(s.events, &event{s.now + delay, what, f})
}

// round is one round of the broker's loop: some of what is due is delivered,
// in any order, then the round settles.
func (s *world) round() {
	s.b.now = s.now
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
	s.b.settle()
	s.watchWords()
}

// watchWords checks that every generation ends once: a word only moves to a
// later generation, or loses its held mark.
func (s *world) watchWords() {
	if s.b.models["sim"] == nil {
		return // forgotten, its board is gone
	}
	for i := range s.words {
		was, is := s.words[i], s.m.board.Word(uint32(i))
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

// kill is the broker's SIGKILL.
func (s *world) kill(p *peer) error {
	for _, w := range s.workers {
		if w.sess.peer != p {
			continue
		}
		if w.unkillable {
			return fmt.Errorf("not permitted")
		}
		s.note("%s is sent SIGKILL", p.name)
		w.killed = true
		return nil
	}
	s.fail("broker kills somebody who is no worker")
	return nil
}

func (s *world) attachClient() {
	window := 1 + s.rng.IntN(min(6, s.m.layout.Slots))
	s.b.now = s.now
	name := fmt.Sprintf("client%d", len(s.clients))
	sess, err := s.m.attachClient(s.peer(name), window)
	if err != nil {
		return // no room
	}
	c := &simClient{s: s, name: name, sess: sess, slots: make([]simSlot, window),
		ring: shm.Producer[shm.Commit]{Ring: shm.CommitRing(sess.seg, window)}, garbage: s.chance(0.05)}
	for i := range c.slots {
		c.slots[i].gen = sess.firstGen()
		s.leased[int(sess.first)+i]++
		s.words[int(sess.first)+i] = s.m.board.Word(sess.first + uint32(i))
	}
	s.clients = append(s.clients, c)
	s.note("%s attaches, window %d+%d", name, sess.first, window)
	s.b.settle()
}

func (s *world) attachWorker() {
	s.b.now = s.now
	name := fmt.Sprintf("worker%d", len(s.workers))
	depth := 1 + s.rng.IntN(3)
	sess, err := s.m.attachWorker(s.peer(name), control.WorkerInfo{Depth: depth, Weight: 1})
	if err != nil {
		s.fail("attach worker: %v", err)
	}
	w := &simWorker{s: s, name: name, sess: sess, box: shm.NewMailbox(sess.seg, depth, s.m.layout.MaxBatch),
		done: shm.Producer[shm.Done]{Ring: shm.DoneRing(sess.seg, depth)}, unkillable: s.chance(0.1), garbage: s.chance(0.05)}
	s.workers = append(s.workers, w)
	s.note("%s attaches, depth %d", name, depth)
	s.b.settle()
}

func (s *world) liveWorkers() (n int) {
	for _, w := range s.workers {
		if !w.dead && !w.sess.gone {
			n++
		}
	}
	return n
}

func (s *world) liveClients() (n int) {
	for _, c := range s.clients {
		if !c.dead && !c.sess.left {
			n++
		}
	}
	return n
}

// step lets somebody do something, and time pass.
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
	s.watchWords()
	if s.chance(0.3) || s.b.nextTimer() <= s.now {
		s.round()
	}
}

// run plays a seed to its end and checks the promises.
func (s *world) run() {
	s.attachWorker()
	s.attachClient()
	for range 100 + s.rng.IntN(900) {
		if s.b.models["sim"] == nil {
			return // its last peer left
		}
		if s.liveClients() < 3 && s.chance(0.1) {
			s.attachClient()
		}
		if s.liveWorkers() < 2 && s.chance(0.1) {
			s.attachWorker()
		}
		s.step()
	}
	s.finish()
}

// finish lets everything come to its end without faults, and looks whether
// anything is left.
func (s *world) finish() {
	s.calm = true
	s.note("from here on without faults")
	for i := 0; !s.quiet(); i++ {
		if s.b.models["sim"] == nil {
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
		if !c.dead && !c.sess.left {
			c.leave("closes")
		}
	}
	for i := 0; len(s.events) > 0 || s.m.held > 0 || s.m.batcher.Queued() > 0; i++ {
		if i == 20000 {
			s.fail("does not come to an end after the clients left: %s", s.unfinished())
		}
		s.step()
	}
	s.m.touch()
	s.round()
	s.books()
}
