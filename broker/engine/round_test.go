// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"bytes"
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/admin/stats"
	"github.com/ringbatch/ringbatch/broker/auto"
	"github.com/ringbatch/ringbatch/broker/batcher"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
)

// books are the broker's books about a ring, and all shared memory.
type books struct {
	slots  []slotInfo
	memory [][]byte
	rest   string
}

func booksOf(s *world) (b books) {
	b.memory = [][]byte{bytes.Clone(s.r.bseg.Bytes()), bytes.Clone(s.r.planes.Bytes())}
	for _, c := range s.clients {
		if c.sess.isAttached() {
			b.memory = append(b.memory, bytes.Clone(c.sess.seg.Bytes()))
		}
		pending, _ := c.sess.commits.Pending()
		b.rest += fmt.Sprintln(c.sess.busy, c.sess.last, !c.sess.isAttached(), c.sess.unread, pending)
	}
	for _, w := range s.workers {
		if w.sess.state != workerGone {
			b.memory = append(b.memory, bytes.Clone(w.sess.seg.Bytes()))
		}
		pending, _ := w.sess.done.Pending()
		b.rest += fmt.Sprintln(w.sess.mails, w.sess.state, w.sess.faults, w.sess.deathDue, pending)
	}
	q, st := s.st.batcher, &s.st.stats
	b.rest += fmt.Sprintln(s.r.windows, s.r.held, len(s.r.clients), q.Queued(), q.QueuedRows(), q.IdleWorkers(), q.Joinable(),
		st.requests, st.byStatus, st.batches, st.requeued, st.offenders, st.lost, s.st.dirty, len(s.l.dirty))
	b.slots = slices.Concat(s.r.books...)
	return b
}

// changeNothing calls look at any moment of faulty worlds: workers may have answered,
// died, or written nonsense that the loop has not read. look must not change the books.
func changeNothing(t *testing.T, firstSeed int64, seeds int, look func(s *world)) {
	t.Helper()
	for seed := firstSeed; seed < firstSeed+int64(seeds); seed++ {
		s := newWorld(t, seed)
		s.attachWorker()
		s.attachClient()
		for range 300 {
			s.step()
			if s.forgotten() {
				break
			}
			if s.liveWorkers() == 0 {
				s.attachWorker()
			}
			if s.liveClients() == 0 {
				s.attachClient()
			}
			was := booksOf(s)
			look(s)
			is := booksOf(s)
			if !slices.Equal(was.slots, is.slots) || !slices.EqualFunc(was.memory, is.memory, bytes.Equal) || was.rest != is.rest {
				t.Fatalf("seed %d: the books changed:\n%s\n%s", seed, was.rest, is.rest)
			}
		}
	}
}

func TestTheCheckOfACommitChangesNothing(t *testing.T) {
	legal, illegal := 0, 0
	changeNothing(t, 1000, unlessShort(30, 10), func(s *world) {
		i := slices.IndexFunc(s.clients, func(c *simClient) bool { return !c.dead && c.sess.isAttached() })
		if i < 0 {
			return
		}
		c := s.clients[i].sess
		e := shm.Commit{Kind: shm.KindCommit, Level: -1, Rows: uint32(s.rng.IntN(4)), Slot: c.first + uint32(s.rng.IntN(c.window+1))}
		e.Gen = s.r.slot(min(e.Slot, uint32(s.r.layout.Slots-1))).gen + uint32(s.rng.IntN(5)/2)
		first, second := s.r.checkCommit(c, &e), s.r.checkCommit(c, &e)
		if fmt.Sprint(first) != fmt.Sprint(second) {
			t.Fatalf("the first check of %+v says %v, the second %v", e, first, second)
		}
		if first == nil {
			legal++
		} else {
			illegal++
		}
	})
	if legal < 100 || illegal < 100 {
		t.Errorf("%d legal and %d illegal commits: the test does not test", legal, illegal)
	}
}

// quietModel does not wait, and has a long lease, so only rounds move its clock.
var quietModel = policy.New(policy.Slots(64), policy.Lease(time.Hour), policy.MaxBatchSize(4), policy.WaitTime(0))

// commitOne has the first client commit one row, which the loop reads.
func (s *world) commitOne() {
	c := s.clients[0]
	x := &c.slots[0]
	x.gen++
	x.state, x.rows = simCommitted, 1
	*s.value(&s.r.layout.Inputs[0], c.sess.first) = stamp(c.sess.first, x.gen)
	c.ring.Push(&shm.Commit{Kind: shm.KindCommit, Level: -1, Rows: 1, Slot: c.sess.first, Gen: x.gen, Committed: s.now})
	s.ringAndSettle(c.sess)
}

// ringAndSettle is a round in which a client rings.
func (s *world) ringAndSettle(c *ClientSession) {
	s.l.beginRound()
	s.r.clientRang(c)
	s.l.settleRound()
}

// serve lets the first client commit n requests one after the other, each answered.
func (s *world) serve(t *testing.T, n int) {
	t.Helper()
	w := s.workers[0]
	for range n {
		s.commitOne()
		w.asleep = false
		w.take()
		if len(w.batches) != 1 {
			t.Fatalf("%d batches came", len(w.batches))
		}
		for len(w.batches) > 0 {
			w.work()
		}
		s.now += int64(time.Millisecond)
	}
}

func TestAThousandIdleModelsCostARoundNothing(t *testing.T) {
	work := map[int]stats.Loop{}
	for _, models := range []int{1, 1000} {
		s := newModel(t, quietModel)
		for range models - 1 {
			s.mustAdd(t, quietModel)
		}
		for _, x := range s.worlds { // each has been in use
			x.attachWorker()
			x.attachClient()
			x.serve(t, 1)
		}
		s.st.touch()
		s.round(s.l)
		before := s.l.work
		s.serve(t, 100)
		after := s.l.work
		work[models] = stats.Loop{
			Decisions: after.Decisions - before.Decisions, Timers: after.Timers - before.Timers, Turns: after.Turns - before.Turns,
		}
		if len(s.l.dirty) > 0 || len(s.l.spinning) > 0 || len(s.l.waiting) > 0 {
			t.Errorf("%d stages to decide, %d to spin for, %d rings to visit", len(s.l.dirty), len(s.l.spinning), len(s.l.waiting))
		}
	}
	if work[1] != work[1000] || work[1].Decisions != 100 {
		t.Errorf("100 requests took %+v alone, %+v beside 999 idle models", work[1], work[1000])
	}
}

// flooder is a client that sends cancels without effect. They are legal (a cancel may
// come after the end), so a client could send them all the time.
type flooder struct {
	*ClientSession
	commits shm.Producer[shm.Commit]
	pushed  int
}

func newFlooder(t *testing.T, s *world, window int) *flooder {
	t.Helper()
	c, err := s.attach("flood", window)
	must.Do(t, err)
	return &flooder{ClientSession: c, commits: shm.Producer[shm.Commit]{Ring: shm.CommitRing(c.seg, window)}}
}

// push sends up to n entries, as many as fit, and rings.
func (f *flooder) push(n int) {
	for ; n > 0; n-- {
		if _, full := f.commits.Push(&shm.Commit{Kind: shm.KindCancel, Rows: 1, Slot: f.first}); full {
			break
		}
		f.pushed++
	}
	f.ring.clientRang(f.ClientSession)
}

func (f *flooder) read() int {
	left, _ := f.ClientSession.commits.Pending()
	return f.pushed - left
}

// spread is the least and the most of a list.
func spread(list []int) (least, most int) { return slices.Min(list), slices.Max(list) }

const flood = 1 << 20

func TestAClientThatNeverStopsHasOneTurnPerRound(t *testing.T) {
	const window = 4096
	flooded := newModel(t, policy.New(policy.Slots(window), policy.Lease(time.Hour), policy.MaxBatchSize(8)))
	other := flooded.mustAdd(t, quietModel)
	other.attachWorker()
	other.attachClient()
	f := newFlooder(t, flooded, window)
	for round := range 100 {
		f.push(flood)
		before := flooded.l.work.Turns
		other.serve(t, 1) // in one round
		if turns := flooded.l.work.Turns - before; turns != 1 {
			t.Fatalf("%d visits in a round", turns)
		}
		if !f.unread || f.read() > (round+1)*(leastVisit+clientTurn) {
			t.Fatalf("%d of %d entries are read after %d rounds", f.read(), f.pushed, round+1)
		}
	}
	for f.unread { // it stops, and the loop reads its ring to the end
		flooded.round(flooded.l)
	}
	if f.read() != f.pushed || !f.isAttached() {
		t.Errorf("%d of %d entries are read, thrown out: %v", f.read(), f.pushed, !f.isAttached())
	}
}

// However many clients flood, a round has an end, each of them has its turn, and a
// modest client waits for one turn of each.
func TestClientsOfAModelThatNeverStopTakeTurns(t *testing.T) {
	const clients, window = 100, 64
	s := newModel(t, policy.New(policy.Slots((clients+1)*window), policy.MaxBatchSize(8)))
	var all []*flooder
	for range clients {
		all = append(all, newFlooder(t, s, window))
	}
	readOfAll := func() (list []int, sum int) {
		for _, f := range all {
			list = append(list, f.read())
			sum += f.read()
		}
		return list, sum
	}
	modest := newFlooder(t, s, window)
	asked, rounds := 0, 0
	for round := range 10 * clients {
		_, before := readOfAll()
		for _, f := range all {
			f.push(flood)
		}
		if modest.read() == modest.pushed && asked < 5 {
			modest.push(1)
			asked, rounds = asked+1, round
		}
		s.round(s.l)
		if modest.read() < modest.pushed && round-rounds > clients*clientTurn/leastVisit+1 {
			t.Fatalf("one entry is not read after %d rounds", round-rounds)
		}
		if _, after := readOfAll(); after-before > leastVisit+clientTurn {
			t.Fatalf("%d entries in a round", after-before)
		}
	}
	list, _ := readOfAll()
	if least, most := spread(list); most-least > clientTurn || least == 0 || asked != 5 {
		t.Errorf("between %d and %d entries of a client were read", least, most)
	}
}

// The same holds between models of one loop, however many clients flood each of them.
func TestModelsWhoseClientsNeverStopTakeTurns(t *testing.T) {
	const models, window = 50, 64
	s := newModel(t, policy.New(policy.Slots(window), policy.MaxBatchSize(8)))
	var all []*flooder
	for i := range models {
		x := s.mustAdd(t, policy.New(policy.Slots(10*window), policy.Lease(time.Hour), policy.MaxBatchSize(8)))
		for range 1 + 4*(i%2) { // more clients do not make a model's part larger
			all = append(all, newFlooder(t, x, window))
		}
	}
	modest := newFlooder(t, s, 8)
	for range 200 {
		for _, f := range all {
			f.push(flood)
		}
		modest.push(1)
		for rounds := 1; modest.read() < modest.pushed; rounds++ {
			if rounds > models*(leastVisit+clientTurn)/roundRows+2 {
				t.Fatalf("one entry is not read after %d rounds", rounds)
			}
			s.round(s.l)
		}
	}
	byModel := map[*Ring]int{}
	for _, f := range all {
		byModel[f.ring] += f.read()
	}
	if least, most := spread(slices.Collect(maps.Values(byModel))); most-least > 2*(leastVisit+clientTurn) || least == 0 {
		t.Errorf("between %d and %d entries of a model were read", least, most)
	}
}

// A client that leaves with a long queue does not hold the loop up either.
func TestAClientThatLeavesWithALongQueueIsPartedWithInTurns(t *testing.T) {
	const window = 4000
	s := newModel(t, policy.New(policy.Slots(window), policy.Lease(time.Hour), policy.MaxBatchSize(8)))
	f := newFlooder(t, s, window)
	for i := range uint32(window) {
		f.commits.Push(&shm.Commit{Kind: shm.KindCommit, Level: -1, Rows: 1, Slot: f.first + i, Gen: 1, Committed: s.now})
	}
	s.r.clientRang(f.ClientSession)
	for f.unread {
		s.round(s.l)
	}
	if f.busy != window {
		t.Fatalf("%d requests wait", f.busy)
	}
	s.r.clientLeft(f.ClientSession, "it hung up")
	rounds := 0
	for before := f.busy; f.busy > 0; before = f.busy {
		s.round(s.l)
		if before-f.busy > 2*partingTurn {
			t.Fatalf("%d requests were canceled in a round", before-f.busy)
		}
		rounds++
	}
	if free := s.r.windows.free; free != window || rounds < 5 {
		t.Errorf("%d slots are free after %d rounds", free, rounds)
	}
	if got := s.st.stats.byStatus[status.ErrCanceled]; got != window {
		t.Errorf("%d requests were canceled", got)
	}
}

// A client has its answer before the broker hears of it. If the client leaves
// then, its window is free at once: the next client wants the same slots.
func TestAClientThatLeavesWithItsAnswerReturnsItsWindow(t *testing.T) {
	s := newModel(t, quietModel)
	s.attachWorker()
	s.attachClient()
	s.serve(t, 1)
	s.commitOne()
	c, w := s.clients[0], s.workers[0]
	w.asleep = false
	w.take()
	for w.batches[0].ended == 0 {
		w.work()
	}
	s.r.clientLeft(c.sess, "it hung up")
	if free := s.r.windows.free; free != s.r.layout.Slots {
		t.Errorf("%d of %d slots are free", free, s.r.layout.Slots)
	}
	w.work() // "done"
	s.roundAfter(0)
	if got := s.st.stats.byStatus; got[status.OK] != 2 || got[status.ErrCanceled] != 0 {
		t.Errorf("the requests ended as %v", got)
	}
}

// endTimes is an advisor that notes when requests ended.
type endTimes struct {
	batcher.FixedWait
	at []batcher.Time
}

func (e *endTimes) RequestEnded(_ batcher.RequestID, at batcher.Time) { e.at = append(e.at, at) }

// The advisor learns when a request was answered, also if its client's next request comes before the worker's "done".
func TestAnEarlyAnswerHasItsTime(t *testing.T) {
	s := newModel(t, quietModel)
	times := &endTimes{}
	b, err := batcher.NewAdvised(s.st.settings, times)
	if err != nil {
		t.Fatal(err)
	}
	s.st.batcher = &auto.Batcher{Batcher: b}
	s.attachWorker()
	s.attachClient()
	s.commitOne()
	w := s.workers[0]
	w.asleep = false
	w.take()
	for w.batches[0].ended == 0 {
		w.work()
	}
	answered := s.now
	s.r.board.Record(s.clients[0].sess.first).Finished = answered
	s.now += int64(time.Millisecond)
	s.commitOne()
	if len(times.at) != 1 || times.at[0] != batcher.Time(answered) {
		t.Errorf("requests ended at %v, the answer came at %d", times.at, answered)
	}
}

// A request that is larger than any batch ends at once, and the loop does not look at
// each of its slots.
func TestARequestLargerThanAnyBatchEndsAtOnce(t *testing.T) {
	s := newModel(t, policy.New(policy.Slots(1024), policy.MaxBatchSize(8)))
	c := newFlooder(t, s, 1024)
	for range 3 {
		gen := s.r.slot(c.first).gen + 1
		c.commits.Push(&shm.Commit{Kind: shm.KindCommit, Level: -1, Rows: 1024, Slot: c.first, Gen: gen, Committed: s.now})
		s.ringAndSettle(c.ClientSession)
		if w := s.r.board.Word(c.first); w.Status() != status.ErrTooLarge || w.Held() || c.busy != 0 || !c.isAttached() {
			t.Fatalf("the client sees %v, %d busy, thrown out: %v", w, c.busy, !c.isAttached())
		}
	}
}

// The loop asks many busy workers once per round, and loses no batch that they finish
// later in the round.
func TestManyBusyWorkersAreAskedOncePerRound(t *testing.T) {
	s := newModel(t, policy.New(policy.MaxBatchSize(1)).Over(quietModel))
	const workers, window = fewWorkers + 4, 64
	for range workers {
		s.attachWorker()
	}
	c := newFlooder(t, s, window)
	for gen := uint32(1); gen <= 20; gen++ {
		for slot := c.first; slot < c.first+window; slot++ { // more than the workers can hold
			c.commits.Push(&shm.Commit{Kind: shm.KindCommit, Level: -1, Rows: 1, Slot: slot, Gen: gen, Committed: s.now})
			*s.value(&s.r.layout.Inputs[0], slot) = stamp(slot, gen)
		}
		for first := true; first || c.busy > 0; first = false {
			s.l.beginRound()
			s.r.clientRang(c.ClientSession)
			for _, w := range s.workers { // after the loop has asked them
				w.asleep = false
				for w.take(); len(w.batches) > 0; {
					w.work()
				}
			}
			s.st.touch()
			s.l.settleRound()
		}
	}
	if len(s.st.busy) != 0 || s.st.stats.byStatus[status.OK] != 20*window {
		t.Errorf("%d workers busy, %v", len(s.st.busy), s.st.stats.byStatus)
	}
}
