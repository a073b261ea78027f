// SPDX-License-Identifier: Apache-2.0

package batcher

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/policy"
)

// loopWorld is one worker that takes all that is queued, a short wait after the first
// of it came, and what its clients do. The learner sees their requests and answers.
type loopWorld struct {
	learner *learner
	rng     *rand.Rand
	now     Time
	sends   []loopSend // that are to come, by time
	queue   []loopSend
	running []loopSend
	ends    Time // of what runs, or when what is queued begins to
	id      RequestID
	think   Time // closed: mean time from an answer to the next request
	after   func(loopSend)
}

type loopSend struct {
	at     Time
	client ClientID
	id     RequestID
}

const ms = Time(time.Millisecond)

func newLoopWorld() *loopWorld {
	return &loopWorld{
		learner: newLearner(&policy.Settings{MaxBatchSize: 64, WaitTime: policy.Auto}),
		rng:     rand.New(rand.NewPCG(1, 2)), ends: Never, after: func(loopSend) {},
	}
}

func (w *loopWorld) exponential(mean Time) Time { return Time(w.rng.ExpFloat64() * float64(mean)) }

func (w *loopWorld) willSend(at Time, c ClientID) {
	i, _ := slices.BinarySearchFunc(w.sends, at, func(s loopSend, at Time) int { return int(max(-1, min(1, s.at-at))) })
	w.sends = slices.Insert(w.sends, i, loopSend{at: at, client: c})
}

// run plays until so many more requests were sent.
func (w *loopWorld) run(requests int) {
	for requests > 0 {
		if len(w.sends) > 0 && w.sends[0].at <= w.ends {
			s := w.sends[0]
			w.sends = w.sends[1:]
			w.now = s.at
			s.id = w.id
			w.id = (w.id + 1) % 4096
			w.learner.arrived(&Request{ID: s.id, Client: s.client, Rows: 1, Arrived: w.now}, 0)
			w.queue = append(w.queue, s)
			if w.ends == Never {
				w.ends = w.now + 2*ms
			}
			w.after(s)
			requests--
			continue
		}
		w.now = w.ends
		for _, s := range w.running {
			w.learner.answered(s.id, s.client, w.now)
			if w.think > 0 {
				w.willSend(w.now+w.exponential(w.think), s.client)
			}
		}
		w.running, w.queue = w.queue, nil
		w.ends = Never
		if len(w.running) > 0 {
			w.ends = w.now + 5*ms + ms*Time(len(w.running))/10
		}
	}
}

// closedShare is in how many of the windows the load is taken for a closed one, when a
// few have been seen.
func (w *loopWorld) closedShare() float64 {
	p := newReplay(w.learner)
	closed := 0
	for i := range 60 {
		w.run(500)
		if p.load(500); i >= 10 && p.closed {
			closed++
		}
	}
	return float64(closed) / 50
}

func TestAClosedLoopIsTakenForOne(t *testing.T) {
	for _, c := range []struct {
		name              string
		clients, inFlight int
		think             Time
	}{{"one in flight", 40, 1, ms}, {"one in flight, long thoughts", 60, 1, 15 * ms}, {"four in flight", 12, 4, 2 * ms}} {
		w := newLoopWorld()
		w.think = c.think
		for range c.inFlight {
			for k := range c.clients {
				w.willSend(w.exponential(c.think)+1, ClientID(k))
			}
		}
		if x := w.closedShare(); x < 0.9 {
			t.Errorf("%s: in %.0f %% of the windows only", c.name, 100*x)
		}
	}
}

// Many users who know nothing of each other, and send through a few processes.
func TestAnOpenLoopIsNotTakenForAClosedOne(t *testing.T) {
	for _, c := range []struct {
		name           string
		every, on, off Time
	}{{"even", ms, 0, 0}, {"busy", ms / 6, 0, 0}, {"bursts", ms / 4, 20 * ms, 60 * ms}, {"long bursts", ms / 8, 50 * ms, 50 * ms}} {
		w := newLoopWorld()
		burstEnds := w.exponential(c.on)
		w.after = func(s loopSend) {
			at := w.now + 1 + w.exponential(c.every)
			for c.on > 0 && at > burstEnds {
				begins := burstEnds + w.exponential(c.off)
				burstEnds = begins + w.exponential(c.on)
				at = begins + 1 + w.exponential(c.every)
			}
			w.willSend(at, (s.client+1)%64)
		}
		w.willSend(1, 0)
		if x := w.closedShare(); x > 0.1 {
			t.Errorf("%s: it is, in %.0f %% of the windows", c.name, 100*x)
		}
	}
}

func TestAnswersThatTookNoTimeTellNothing(t *testing.T) {
	var l loop
	for range 2 {
		var f feedback
		for range 8 {
			f.add(float64(ms), 0)
		}
		l.observe(&f)
	}
	if l.evidence != 0 {
		t.Errorf("evidence of %v", l.evidence)
	}
	var f feedback
	for i := range 64 {
		f.add(float64(ms)*float64(1+i), float64(ms)*float64(1+i))
	}
	l.observe(&f)
	if !l.closed() {
		t.Error("what tells afterwards is not heard")
	}
}
