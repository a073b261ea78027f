// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"bytes"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/admin/stats"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
)

// booksOf is everything that the broker knows of a ring, and all memory that it
// shares.
func booksOf(s *world) (slots []slotInfo, memory [][]byte, rest string) {
	memory = [][]byte{bytes.Clone(s.r.bseg.Bytes()), bytes.Clone(s.r.planes.Bytes())}
	for _, c := range s.clients {
		if c.sess.isAttached() {
			memory = append(memory, bytes.Clone(c.sess.seg.Bytes()))
		}
		pending, _ := c.sess.commits.Pending()
		rest += fmt.Sprintln(c.sess.busy, c.sess.last, !c.sess.isAttached(), c.sess.unread, pending)
	}
	for _, w := range s.workers {
		if w.sess.state != workerGone {
			memory = append(memory, bytes.Clone(w.sess.seg.Bytes()))
		}
		pending, _ := w.sess.done.Pending()
		rest += fmt.Sprintln(w.sess.mails, w.sess.state, w.sess.faults, w.sess.deathDue, pending)
	}
	b, st := s.st.batcher, &s.st.stats
	rest += fmt.Sprintln(s.r.windows, s.r.held, len(s.r.clients), b.Queued(), b.QueuedRows(), b.IdleWorkers(), b.Joinable(),
		st.requests, st.byStatus, st.batches, st.requeued, st.offenders, st.lost, s.st.dirty, len(s.l.dirty))
	return slices.Concat(s.r.books...), memory, rest
}

// A commit may be judged at any moment, legal or not, while workers have
// answered, died, or written nonsense that nobody has read yet.
func TestTheCheckOfACommitChangesNothing(t *testing.T) {
	legal, illegal := 0, 0
	for seed := range int64(unlessShort(60, 10)) {
		s, err := newWorld(1000 + seed)
		if err != nil {
			t.Fatal(err)
		}
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
			i := slices.IndexFunc(s.clients, func(c *simClient) bool { return !c.dead && c.sess.isAttached() })
			if i < 0 {
				s.attachClient()
				continue
			}
			c := s.clients[i].sess
			e := shm.Commit{Kind: shm.KindCommit, Level: -1, Rows: uint32(s.rng.IntN(4)), Slot: c.first + uint32(s.rng.IntN(c.window+1))}
			e.Gen = s.r.slot(min(e.Slot, uint32(s.r.layout.Slots-1))).gen + uint32(s.rng.IntN(5)/2)
			slots, memory, rest := booksOf(s)
			first, second := s.r.checkCommit(c, &e), s.r.checkCommit(c, &e)
			if fmt.Sprint(first) != fmt.Sprint(second) {
				t.Fatalf("seed %d: the first time %v, the second %v", seed, first, second)
			}
			if first == nil {
				legal++
			} else {
				illegal++
			}
			slots2, memory2, rest2 := booksOf(s)
			if !slices.Equal(slots, slots2) || !slices.EqualFunc(memory, memory2, bytes.Equal) || rest != rest2 {
				t.Fatalf("seed %d: the check of %+v (%v) changed the books:\n%s\n%s", seed, e, first, rest, rest2)
			}
		}
		s.close()
	}
	if legal < 100 || illegal < 100 {
		t.Errorf("%d legal and %d illegal commits: the test does not test", legal, illegal)
	}
}

// quietModel has no other clock than the loop's rounds: it does not wait, and
// its lease is long.
var quietModel = policy.New(policy.Slots(64), policy.Lease(time.Hour), policy.MaxBatchSize(4), policy.WaitTime(0))

// served lets a client commit n requests one after the other, each answered.
func served(t *testing.T, s *world, n int) {
	t.Helper()
	c, w := s.clients[0], s.workers[0]
	for range n {
		x := &c.slots[0]
		x.gen++
		x.state, x.rows = simCommitted, 1
		*s.value(&s.r.layout.Inputs[0], c.sess.first) = stamp(c.sess.first, x.gen)
		c.ring.Push(&shm.Commit{Kind: shm.KindCommit, Level: -1, Rows: 1, Slot: c.sess.first, Gen: x.gen, Committed: s.now})
		s.l.beginRound()
		s.r.clientRang(c.sess)
		s.l.settleRound()
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
		h, err := newHost(1, 1, 0)
		if err != nil {
			t.Fatal(err)
		}
		h.calm = true
		for range models {
			if _, err := h.add(quietModel); err != nil {
				t.Fatal(err)
			}
		}
		for _, s := range h.worlds { // each has been in use
			s.attachWorker()
			s.attachClient()
			s.workers[0].garbage, s.clients[0].garbage = false, false
			served(t, s, 1)
		}
		s := h.worlds[0]
		s.st.touch()
		h.round(s.l)
		before := s.l.work
		served(t, s, 100)
		after := s.l.work
		work[models] = stats.Loop{
			Decisions: after.Decisions - before.Decisions, Timers: after.Timers - before.Timers, Turns: after.Turns - before.Turns,
		}
		if len(s.l.dirty) > 0 || len(s.l.spinning) > 0 || len(s.l.waiting) > 0 {
			t.Errorf("%d stages to decide, %d to spin for, %d rings to visit after the rounds", len(s.l.dirty), len(s.l.spinning), len(s.l.waiting))
		}
		h.close()
	}
	if work[1] != work[1000] || work[1].Decisions != 100 {
		t.Errorf("100 requests took %+v beside nobody, %+v beside 999 idle models", work[1], work[1000])
	}
}

// Entries that come to nothing are legal (a cancel may come after the end), so
// a client could send them for ever. It must not keep the loop from others.
func TestAClientThatNeverStopsHasOneTurnPerRound(t *testing.T) {
	h, err := newHost(1, 1, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer h.close()
	h.calm = true
	const window = 4096
	flooded, err := h.add(policy.New(policy.Slots(window), policy.Lease(time.Hour), policy.MaxBatchSize(8)))
	if err != nil {
		t.Fatal(err)
	}
	other, err := h.add(quietModel)
	if err != nil {
		t.Fatal(err)
	}
	other.attachWorker()
	other.attachClient()
	other.workers[0].garbage = false
	c, err := flooded.attach("flood", window)
	if err != nil {
		t.Fatal(err)
	}
	ring := shm.Producer[shm.Commit]{Ring: shm.CommitRing(c.seg, window)}
	pushed := 0
	flood := func() {
		for {
			if _, full := ring.Push(&shm.Commit{Kind: shm.KindCancel, Rows: 1, Slot: c.first}); full {
				return
			}
			pushed++
		}
	}
	flood()
	for round := range 100 {
		flooded.r.clientRang(c) // its doorbell, which it may ring as often as it likes
		before := flooded.l.work.Turns
		served(t, other, 1) // in one round
		if turns := flooded.l.work.Turns - before; turns != 1 {
			t.Fatalf("%d visits in a round", turns)
		}
		if pending, _ := c.commits.Pending(); !c.unread || pushed-pending > (round+1)*(leastVisit+clientTurn) {
			t.Fatalf("%d of %d entries are read after %d rounds", pushed-pending, pushed, round+1)
		}
		flood()
	}
	for c.unread { // it stops, and its ring is read to the end
		h.round(flooded.l)
	}
	if pending, err := c.commits.Pending(); pending != 0 || err != nil || !c.isAttached() {
		t.Errorf("%d entries left, %v, thrown out: %v", pending, err, !c.isAttached())
	}
}

// flooder is a client that sends cancels which come to nothing.
type flooder struct {
	*ClientSession
	ring   shm.Producer[shm.Commit]
	pushed int
}

func newFlooder(t *testing.T, s *world, window int) *flooder {
	t.Helper()
	c, err := s.attach("flood", window)
	if err != nil {
		t.Fatal(err)
	}
	return &flooder{ClientSession: c, ring: shm.Producer[shm.Commit]{Ring: shm.CommitRing(c.seg, window)}}
}

// flood fills its ring and rings.
func (f *flooder) flood() {
	for {
		if _, full := f.ring.Push(&shm.Commit{Kind: shm.KindCancel, Rows: 1, Slot: f.first}); full {
			break
		}
		f.pushed++
	}
	f.ClientSession.ring.clientRang(f.ClientSession)
}

func (f *flooder) read() int {
	left, _ := f.commits.Pending()
	return f.pushed - left
}

// However many there are of such clients, a round has an end, each of them has
// its turn, and one that has little to say waits for one turn of each.
func TestClientsOfAModelThatNeverStopTakeTurns(t *testing.T) {
	h, err := newHost(1, 1, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer h.close()
	const clients, window = 100, 64
	s, err := h.add(policy.New(policy.Slots((clients+1)*window), policy.MaxBatchSize(8)))
	if err != nil {
		t.Fatal(err)
	}
	var all []*flooder
	for range clients {
		all = append(all, newFlooder(t, s, window))
	}
	modest := newFlooder(t, s, window)
	asked, rounds := 0, 0
	for round := range 10 * clients {
		read := 0
		for _, f := range all {
			read -= f.read()
			f.flood()
		}
		if modest.read() == modest.pushed && asked < 5 {
			modest.ring.Push(&shm.Commit{Kind: shm.KindCancel, Rows: 1, Slot: modest.first})
			modest.pushed++
			s.r.clientRang(modest.ClientSession)
			asked, rounds = asked+1, round
		}
		h.round(s.l)
		if modest.read() < modest.pushed && round-rounds > clients*clientTurn/leastVisit+1 {
			t.Fatalf("one entry is not read after %d rounds", round-rounds)
		}
		for _, f := range all {
			read += f.read()
		}
		if read > leastVisit+clientTurn {
			t.Fatalf("%d entries in a round", read)
		}
	}
	least, most := all[0].read(), all[0].read()
	for _, f := range all {
		least, most = min(least, f.read()), max(most, f.read())
	}
	if most-least > clientTurn || least == 0 || asked != 5 {
		t.Errorf("between %d and %d entries of a client were read", least, most)
	}
}

// The same between models of one loop, however many clients flood each of them.
func TestModelsWhoseClientsNeverStopTakeTurns(t *testing.T) {
	h, err := newHost(1, 1, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer h.close()
	h.calm = true
	const models, window = 50, 64
	var all []*flooder
	for i := range models {
		s, err := h.add(policy.New(policy.Slots(10*window), policy.Lease(time.Hour), policy.MaxBatchSize(8)))
		if err != nil {
			t.Fatal(err)
		}
		for range 1 + 4*(i%2) { // more clients do not make a model's part larger
			all = append(all, newFlooder(t, s, window))
		}
	}
	s, err := h.add(policy.New(policy.Slots(window), policy.MaxBatchSize(8)))
	if err != nil {
		t.Fatal(err)
	}
	modest := newFlooder(t, s, 8)
	l := s.l
	for range 200 {
		for _, f := range all {
			f.flood()
		}
		modest.ring.Push(&shm.Commit{Kind: shm.KindCancel, Rows: 1, Slot: modest.first})
		modest.pushed++
		s.r.clientRang(modest.ClientSession)
		for rounds := 1; modest.read() < modest.pushed; rounds++ {
			if rounds > models*(leastVisit+clientTurn)/roundRows+2 {
				t.Fatalf("one entry is not read after %d rounds", rounds)
			}
			h.round(l)
		}
	}
	byModel := map[*Ring]int{}
	for _, f := range all {
		byModel[f.ClientSession.ring] += f.read()
	}
	least, most := int(1<<60), 0
	for _, n := range byModel {
		least, most = min(least, n), max(most, n)
	}
	if most-least > 2*(leastVisit+clientTurn) || least == 0 {
		t.Errorf("between %d and %d entries of a model were read", least, most)
	}
}

// A client that leaves with much in its queue, or has a large window, does not
// hold the loop up either.
func TestAClientThatLeavesWithALongQueueIsPartedWithInTurns(t *testing.T) {
	h, err := newHost(1, 1, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer h.close()
	h.calm = true
	const window = 4000
	s, err := h.add(policy.New(policy.Slots(window), policy.Lease(time.Hour), policy.MaxBatchSize(8)))
	if err != nil {
		t.Fatal(err)
	}
	f := newFlooder(t, s, window)
	for i := range uint32(window) {
		f.ring.Push(&shm.Commit{Kind: shm.KindCommit, Level: -1, Rows: 1, Slot: f.first + i, Gen: 1, Committed: s.now})
	}
	s.r.clientRang(f.ClientSession)
	for f.unread {
		h.round(s.l)
	}
	if f.busy != window {
		t.Fatalf("%d requests wait", f.busy)
	}
	s.r.clientLeft(f.ClientSession, "it hung up")
	rounds := 0
	for before := f.busy; f.busy > 0; before = f.busy {
		h.round(s.l)
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
	h, err := newHost(1, 1, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer h.close()
	h.calm = true
	s, err := h.add(quietModel)
	if err != nil {
		t.Fatal(err)
	}
	s.attachWorker()
	s.attachClient()
	served(t, s, 1)
	c, w := s.clients[0], s.workers[0]
	x := &c.slots[0]
	x.gen++
	x.state, x.rows = simCommitted, 1
	*s.value(&s.r.layout.Inputs[0], c.sess.first) = stamp(c.sess.first, x.gen)
	c.ring.Push(&shm.Commit{Kind: shm.KindCommit, Level: -1, Rows: 1, Slot: c.sess.first, Gen: x.gen, Committed: s.now})
	s.l.beginRound()
	s.r.clientRang(c.sess)
	s.l.settleRound()
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
	s.l.beginRound()
	s.l.settleRound()
	if got := s.st.stats.byStatus; got[status.OK] != 2 || got[status.ErrCanceled] != 0 {
		t.Errorf("the requests ended as %v", got)
	}
}

// A request that is larger than any batch ends at once, and costs the loop no
// look at each of its slots.
func TestARequestLargerThanAnyBatchEndsAtOnce(t *testing.T) {
	h, err := newHost(1, 1, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer h.close()
	s, err := h.add(policy.New(policy.Slots(1024), policy.MaxBatchSize(8)))
	if err != nil {
		t.Fatal(err)
	}
	c, err := s.attach("large", 1024)
	if err != nil {
		t.Fatal(err)
	}
	ring := shm.Producer[shm.Commit]{Ring: shm.CommitRing(c.seg, 1024)}
	for gen := uint32(1); gen < 4; gen++ {
		ring.Push(&shm.Commit{Kind: shm.KindCommit, Level: -1, Rows: 1024, Slot: c.first, Gen: s.r.slot(c.first).gen + 1, Committed: s.now})
		s.l.beginRound()
		s.r.clientRang(c)
		s.l.settleRound()
		if w := s.r.board.Word(c.first); w.Status() != status.ErrTooLarge || w.Held() || c.busy != 0 || !c.isAttached() {
			t.Fatalf("the client sees %v, %d busy, thrown out: %v", w, c.busy, !c.isAttached())
		}
	}
}

// More busy workers than are asked for every client are asked once per round,
// and nothing they finish is lost, also what they finish while the round goes
// on and others wait for them.
func TestManyBusyWorkersAreAskedOncePerRound(t *testing.T) {
	h, err := newHost(1, 1, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer h.close()
	h.calm = true
	mc := policy.New(policy.MaxBatchSize(1)).Over(quietModel)
	s, err := h.add(mc)
	if err != nil {
		t.Fatal(err)
	}
	const workers, window = fewWorkers + 4, 64
	for range workers {
		s.attachWorker()
		s.workers[len(s.workers)-1].garbage = false
	}
	c, err := s.attach("client", window)
	if err != nil {
		t.Fatal(err)
	}
	ring := shm.Producer[shm.Commit]{Ring: shm.CommitRing(c.seg, window)}
	work := func() {
		for _, w := range s.workers {
			w.asleep = false
			for w.take(); len(w.batches) > 0; {
				w.work()
			}
		}
	}
	for gen := uint32(1); gen <= 20; gen++ {
		for slot := c.first; slot < c.first+window; slot++ { // more than the workers can hold
			ring.Push(&shm.Commit{Kind: shm.KindCommit, Level: -1, Rows: 1, Slot: slot, Gen: gen, Committed: s.now})
			*s.value(&s.r.layout.Inputs[0], slot) = stamp(slot, gen)
		}
		for first := true; first || c.busy > 0; first = false {
			s.l.beginRound()
			s.r.clientRang(c)
			work() // after they were asked
			s.st.touch()
			s.l.settleRound()
		}
	}
	if len(s.st.busy) != 0 || s.st.stats.byStatus[status.OK] != 20*window {
		t.Errorf("%d workers busy, %v", len(s.st.busy), s.st.stats.byStatus)
	}
}
