// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"fmt"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/broker/batcher"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/status"
)

// simulateMild plays a random schedule in which nothing goes wrong but functions that
// raise. play gets a world with some workers and clients.
func simulateMild(t *testing.T, workers int, poison float64, play func(*world)) {
	t.Helper()
	for seed := int64(1); seed <= int64(unlessShort(100, 30)); seed++ {
		if failure := playMild(seed, workers, poison, play); failure != "" {
			t.Fatalf("seed %d: %s", seed, failure)
		}
	}
}

func playMild(seed int64, workers int, poison float64, play func(*world)) (failure string) {
	h, err := newHost(seed, 1, 0)
	if err != nil {
		return err.Error()
	}
	defer h.close()
	defer func() {
		if p := recover(); p != nil {
			failure = fmt.Sprint(p)
		}
	}()
	h.mild, h.poison = true, poison
	wait := time.Duration(h.rng.IntN(500)) * time.Microsecond
	s, err := h.add(policy.New(policy.Slots(24), policy.MaxBatchSize(1+h.rng.IntN(6)), policy.WaitTime(wait),
		policy.PreserveOrder(h.chance(0.2))))
	if err != nil {
		return err.Error()
	}
	s.st.settings.Lease = time.Hour
	for range workers {
		s.attachWorker()
	}
	for range 4 {
		s.attachClient()
	}
	play(s)
	h.calm = true
	s.finish()
	return ""
}

// steps plays up to some thousand steps, until it is done.
func (s *world) steps(what string, done func() bool) {
	for range 50000 {
		if done() {
			return
		}
		s.step()
	}
	s.fail("it never comes about that %s", what)
}

func (s *world) play(steps int) {
	for range steps {
		s.step()
	}
}

func TestAWorkerThatBeginsToRaiseIsSuspendedAndFailsNobodysRequests(t *testing.T) {
	requests, isolated := uint64(0), uint64(0)
	simulateMild(t, 2, 0, func(s *world) {
		s.play(s.rng.IntN(500))
		broken := s.workers[s.rng.IntN(2)]
		broken.raises = true
		s.steps("a broken worker is suspended", func() bool { return broken.sess.state == workerSuspended })
		had := broken.sess.posted
		s.play(500)
		if broken.sess.state == workerSuspended && broken.sess.posted != had {
			s.fail("a suspended worker gets batches")
		}
		s.now += int64(lastBackoff)
		s.steps("it is asked to prove itself", func() bool { return broken.sess.posted > had })
		s.steps("it is suspended again", func() bool { return broken.sess.state == workerSuspended })
		broken.raises = false
		s.now += int64(lastBackoff)
		s.steps("it serves again", func() bool { return !broken.sess.doubted && !broken.sess.probation })
		if n := s.st.stats.byStatus[status.ErrFailed]; n > 0 {
			s.fail("%d requests failed", n)
		}
		requests += s.st.stats.requests
		isolated += s.st.stats.isolated
	})
	t.Logf("%d requests, %d run again", requests, isolated)
}

func TestPoisonFailsAloneAndCountsAgainstNoWorker(t *testing.T) {
	failed := uint64(0)
	for workers := 1; workers <= 3; workers++ {
		simulateMild(t, workers, 0.1, func(s *world) {
			s.play(3000)
			failed += s.st.stats.byStatus[status.ErrFailed]
			if s.st.stats.suspended > 0 {
				s.fail("a worker was suspended")
			}
			for _, w := range s.workers {
				if w.sess.strikes > 0 {
					s.fail("%s has %d strikes", w.name, w.sess.strikes)
				}
			}
		})
	}
	if failed == 0 {
		t.Error("nothing failed at all")
	}
}

func TestABrokenWorkerIsSuspendedAmongPoison(t *testing.T) {
	simulateMild(t, 3, 0.05, func(s *world) {
		s.workers[0].raises = true
		s.steps("a broken worker is suspended", func() bool { return s.workers[0].sess.state == workerSuspended })
		for _, w := range s.workers[1:] {
			if w.sess.state == workerSuspended {
				s.fail("%s is suspended", w.name)
			}
		}
	})
}

func TestABrokenWorkerIsSuspendedBesideIdleClients(t *testing.T) {
	simulateMild(t, 2, 0, func(s *world) {
		idle := s.clients[1:]
		s.clients = s.clients[:1]
		defer func() { s.clients = append(s.clients, idle...) }()
		s.play(s.rng.IntN(500))
		broken := s.workers[s.rng.IntN(2)]
		broken.raises = true
		s.steps("a broken worker is suspended", func() bool { return broken.sess.state == workerSuspended })
	})
}

func TestTheLastWorkerIsNotSuspended(t *testing.T) {
	simulateMild(t, 2, 0, func(s *world) {
		broken, healthy := s.workers[0], s.workers[1]
		broken.raises = true
		s.steps("a broken worker is suspended", func() bool { return broken.sess.state == workerSuspended })
		broken.raises = false // or its failures would be answers
		healthy.closing = true
		s.steps("the broken one, which is the last, serves", func() bool {
			return healthy.sess.state == workerGone && broken.sess.serves()
		})
		had := broken.sess.batches
		s.steps("it runs batches", func() bool { return broken.sess.batches > had })
	})
}

func TestAClientThatChangesItsInputsSuspendsNoWorker(t *testing.T) {
	for workers := 2; workers <= 3; workers++ {
		simulateMild(t, workers, 0, func(s *world) {
			s.clients[0].poison = changing
			s.play(3000)
			if s.st.stats.suspended > 0 {
				s.fail("a good worker was suspended")
			}
		})
	}
}

// While two clients share each batch that a worker fails, nobody can tell which of the three is to blame.
func TestAWorkerIsSuspendedOnlyIfItFailsBatchesOfSeveralClientsApart(t *testing.T) {
	simulateMild(t, 2, 0, func(s *world) {
		first, second := s.clients[0], s.clients[1]
		for _, c := range []*simClient{first, second} {
			s.steps("each has sent something", func() bool { return s.r.slot(c.sess.last).arrived > 0 })
		}
		w := s.workers[0].sess
		fail := func(clients ...*ClientSession) (suspends bool) {
			s.st.accuseWorker(&failure{by: w, clients: clients})
			suspends = len(s.l.outcomes) > 0
			s.l.outcomes = nil
			return suspends
		}
		for range maxStrikes {
			if fail(first.sess, second.sess) {
				s.fail("a worker is suspended, but a client may be to blame")
			}
		}
		if !s.st.owes(first.sess) || !s.st.owes(second.sess) {
			s.fail("the suspected clients still share batches")
		}
		if fail(first.sess) {
			s.fail("a worker is suspended, but a client may be to blame")
		}
		if !fail(second.sess) {
			s.fail("a worker that failed batches of two clients apart is not suspended")
		}
		w.standing = standing{}
	})
}

// Two clients in lockstep share each batch, and are quiet for long between.
func TestABrokenWorkerIsSuspendedBesideClientsInLockstep(t *testing.T) {
	for _, period := range []time.Duration{100 * time.Millisecond, 400 * time.Millisecond, 2 * time.Second} {
		h, err := newHost(3, 1, 0)
		must.Do(t, err)
		defer h.close()
		h.mild, h.calm = true, true // no other requests
		s, err := h.add(policy.New(policy.Slots(64), policy.MaxBatchSize(16), policy.WaitTime(3*time.Millisecond)))
		must.Do(t, err)
		s.st.settings.Lease = time.Hour
		s.attachWorker()
		s.attachWorker()
		s.attachClient()
		s.attachClient()
		s.workers[0].raises = true
		for tick := 0; s.workers[0].sess.state != workerSuspended; tick++ {
			if tick > 100 {
				t.Fatalf("every %v: %d failed batches suspend no worker", period, s.workers[0].sess.strikes)
			}
			for _, c := range s.clients {
				c.commit()
				s.r.clientRang(c.sess)
			}
			next := s.now + int64(period)
			s.l.now = s.now
			s.round(s.l)
			for i := 0; !s.quiet(); i++ {
				s.now += int64(20 * time.Microsecond)
				s.clients[i%2].look()
				s.workers[i%2].act()
				if i%3 == 0 || s.l.timers.nextDue() <= s.now {
					s.round(s.l)
				}
			}
			s.now = max(s.now, next)
		}
	}
}

// The others have what they have beside the same client with good inputs.
func TestAClientThatFailsTakesNoTimeFromTheOthers(t *testing.T) {
	for _, poison := range []simPoison{raising, changing} {
		var answers [2]int
		for seed := range int64(4) {
			for i, p := range []simPoison{harmless, poison} {
				if failure := playMild(seed, 2, 0, func(s *world) {
					s.clients[0].poison = p
					s.play(30_000)
					for _, c := range s.clients[1:] {
						answers[i] += c.oks
					}
				}); failure != "" {
					t.Fatalf("seed %d: %s", seed, failure)
				}
			}
		}
		t.Logf("%d answers, %d beside good inputs", answers[1], answers[0])
		if answers[1] < answers[0] {
			t.Errorf("poison %d: %d answers, %d beside good inputs", poison, answers[1], answers[0])
		}
	}
}

// A request whose deadline passes while it waits for another worker is not to blame for the death.
func TestOneDeathOfAWorkerPutsNobodyIntoDebt(t *testing.T) {
	simulateMild(t, 2, 0, func(s *world) {
		s.steps("a worker has a batch", func() bool { return len(s.workers[0].batches) > 0 })
		s.workers[0].die("dies")
		for range 500 {
			s.step()
			for _, c := range s.clients {
				if s.st.owes(c.sess) {
					s.fail("%s is in debt", c.name)
				}
			}
		}
		s.attachWorker()
	})
}

func TestOneSlowFailureOfAWorkerPutsNobodyIntoDebt(t *testing.T) {
	simulateMild(t, 2, 0, func(s *world) {
		w := s.workers[0]
		w.raises = true
		s.steps("it has a batch", func() bool { return len(w.batches) > 0 })
		s.now += int64(time.Second)
		s.steps("it fails the batch", func() bool { return len(w.finished) > 0 })
		w.raises = false
		for range 500 {
			s.step()
			for _, c := range s.clients {
				if s.st.owes(c.sess) {
					s.fail("%s is in debt", c.name)
				}
			}
		}
	})
}

func TestAClientThatCancelsRequestsWhichKillIsInDebt(t *testing.T) {
	simulateMild(t, 1, 0, func(s *world) {
		c := s.clients[0]
		s.steps("it is in debt", func() bool {
			if c.runsOn(running) != nil {
				c.cancel()
			}
			if w := c.runsOn(held); w != nil {
				w.die("dies of it")
				s.now += int64(200 * time.Millisecond)
				s.attachWorker()
			}
			return s.st.owes(c.sess)
		})
	})
}

func TestAProcessThatLeavesRequestsWhichKillIsInDebt(t *testing.T) {
	simulateMild(t, 1, 0, func(s *world) {
		c, again := s.clients[0], 0
		process := c.sess.Process.Inode
		s.steps("it is in debt", func() bool {
			w := c.runsOn(running)
			if w == nil {
				return false
			}
			c.dead = true
			s.r.clientLeft(c.sess, "simulated")
			w.die("dies of its request")
			s.now += int64(200 * time.Millisecond)
			s.attachWorker()
			s.steps("its window returns", func() bool { return c.sess.state == clientReturned })
			if again++; again > 5 {
				s.fail("it attached %d times", again)
			}
			peers := s.peers
			for n := len(s.clients); len(s.clients) == n; { // until its window fits
				s.peers = process - 1
				s.attachClient()
			}
			s.peers, c = peers, s.clients[len(s.clients)-1]
			return s.st.owes(c.sess)
		})
	})
}

// runsOn is a worker that has taken a request of the client.
func (c *simClient) runsOn(state slotState) *simWorker {
	s := c.s
	for _, w := range s.workers {
		for _, p := range w.sess.mails {
			for _, q := range p.requests {
				info, taken := s.r.slot(q.head), p.number < w.box.Taken.Load()
				if s.r.stillHas(q, p.batch) && info.client == c.sess && info.state == state && taken && !w.dead {
					return w
				}
			}
		}
	}
	return nil
}

func TestAProcessThatAttachesAgainKeepsItsAccount(t *testing.T) {
	s := newModel(t, policy.New(policy.Slots(24)))
	attach := func() *ClientSession {
		s.peers = 7 // the same process each time
		c, err := s.attach("again", 4)
		must.Do(t, err)
		return c
	}
	leave := func(sessions ...*ClientSession) {
		for _, c := range sessions {
			s.r.clientLeft(c, "simulated")
		}
	}
	first := attach()
	s.st.chargeClient(first, batcher.Time(time.Second))
	beside := attach()
	leave(first)
	again := attach()
	if s.st.owes(beside) || s.st.owes(again) {
		t.Error("a session pays for another one of its process")
	}
	leave(again, beside)
	last := attach()
	if !s.st.owes(last) {
		t.Error("the process is in no debt after it was away")
	}
	leave(last)
	s.l.now += int64(20 * time.Second)
	late := attach()
	if s.st.owes(late) {
		t.Error("it is in debt though all is paid")
	}
	leave(late)
	s.st.chargeClient(late, batcher.Time(time.Second)) // a worker dies with its requests
	if !s.st.owes(attach()) {
		t.Error("the process does not pay for requests that failed after it left")
	}
}
