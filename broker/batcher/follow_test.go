// SPDX-License-Identifier: Apache-2.0

package batcher

import (
	"testing"

	"github.com/ringbatch/ringbatch/policy"
)

// conversation is what one client sends and when it is answered.
type conversation struct {
	learner *learner
	sent    RequestID
}

func newConversation() *conversation {
	return &conversation{learner: newLearner(&policy.Settings{MaxBatchSize: 8, WaitTime: policy.Auto})}
}

func (c *conversation) send(at Time) {
	c.learner.arrived(&Request{ID: c.sent, Rows: 1, Arrived: at}, 0)
	c.sent++
}

func (c *conversation) answer(id RequestID, at Time) { c.learner.answered(id, 0, at) }

// follows checks after which of the client's answers a request comes in a replay,
// and how long after it.
func (c *conversation) follows(t *testing.T, id RequestID, answer uint32, after Time) {
	t.Helper()
	p := newReplay(c.learner)
	p.load(int(c.sent))
	p.followAnswers()
	if r := p.window[id]; !r.follows || r.answered != answer || r.sinceAnswer != after {
		t.Errorf("request %d follows answer %d after %d, want %d after %d", id, r.answered, r.sinceAnswer, answer, after)
	}
}

func TestWhoKeepsTwoInFlightSendsOneForEachAnswer(t *testing.T) {
	c := newConversation()
	c.send(1)
	c.send(1)
	c.answer(0, 10)
	c.answer(1, 10) // together
	c.send(11)
	c.send(13)
	c.answer(2, 20)
	c.send(22) // while 3 runs
	c.answer(3, 30)
	c.send(31)
	c.follows(t, 2, 1, 1)
	c.follows(t, 3, 2, 3)
	c.follows(t, 4, 3, 2)
	c.follows(t, 5, 4, 1)
}

func TestWhoSendsWhenAllIsAnsweredFollowsTheLastAnswer(t *testing.T) {
	c := newConversation()
	for at := Time(1); at < 100; at += 20 {
		c.send(at)
		c.send(at)
		c.answer(c.sent-2, at+10)
		c.answer(c.sent-1, at+19)
	}
	c.follows(t, 2, 2, 1)
	c.follows(t, 8, 8, 1)
}

func TestThePauseBetweenTwoLoadsIsNotTimeToForget(t *testing.T) {
	c := newConversation()
	l := c.learner
	const every = shortestPause / 100
	for i := range Time(50) {
		c.send(every * i)
	}
	last := l.latest(0).clock()
	if got := l.clock(every*49 + remembered*60); got != last+shortestPause {
		t.Errorf("in a pause the clock goes on to %d after the last request, want %d", got-last, shortestPause)
	}
	c.send(every*49 + remembered*60)
	if got := l.latest(0).clock() - last; got != shortestPause {
		t.Errorf("a minute's pause counts as %d, want %d", got, shortestPause)
	}
	if n := l.windowSize(every*49 + remembered*60); n != 51 {
		t.Errorf("%d requests are remembered after the pause, want all 51", n)
	}
	l.busy = 1
	last = l.latest(0).clock()
	c.send(every*49 + remembered*61)
	if got := l.latest(0).clock() - last; got != remembered {
		t.Errorf("a second in which a worker was busy counts as %d, want %d", got, remembered)
	}
}

func TestNobodyWaitsForAClientThatSendsNoMore(t *testing.T) {
	b := mustNew(t, policy.Settings{MaxBatchSize: 8, WaitTime: 1000})
	b.WorkerReady(Worker{})
	b.ClientJoined(0)
	b.ClientJoined(1)
	if err := b.Arrive(0, Request{Rows: 1, Deadline: Never}); err != nil {
		t.Fatal(err)
	}
	if n := len(b.Decide(0).Dispatches); n != 0 {
		t.Fatal("did not wait for the other client")
	}
	b.sendsNoMore(1)
	if n := len(b.Decide(1).Dispatches); n != 1 {
		t.Error("waits for a client that sends no more")
	}
}

func TestClientsThatComeBackAfterAPauseComeTogetherInAReplay(t *testing.T) {
	c := newConversation()
	both := func(at Time) { // one keeps one request in flight, the other two
		for i, client := range []ClientID{0, 1, 1} {
			c.learner.arrived(&Request{ID: c.sent + RequestID(i), Client: client, Rows: 1, Arrived: at}, 0)
		}
		for _, client := range []ClientID{0, 1, 1} {
			c.learner.answered(c.sent, client, at+1000)
			c.sent++
		}
	}
	at := Time(1)
	for range 20 {
		both(at)
		at += 1010
	}
	at += remembered * 60
	for range 20 {
		both(at)
		at += 1010
	}
	p := newReplay(c.learner)
	p.load(int(c.sent))
	if !p.closed {
		t.Error("clients that wait for each answer are taken to send when they please, because of one pause")
	}
	p.followAnswers()
	for _, id := range []RequestID{60, 61, 62} { // the first of each after the pause
		if got := p.window[id].sinceAnswer; got > shortestPause {
			t.Errorf("request %d comes %d after the answer that it follows, want at most the %d that a pause counts", id, got, shortestPause)
		}
	}
}

func TestAClientThatCameBackWithRequestsInFlightIsNoLongerAwaitedOnceItLeft(t *testing.T) {
	b := mustNew(t, policy.Settings{MaxBatchSize: 8, WaitTime: 1000})
	b.ClientJoined(0)
	if err := b.Arrive(0, Request{Rows: 1, Deadline: Never}); err != nil {
		t.Fatal(err)
	}
	b.sendsNoMore(0)
	b.ClientJoined(0)
	b.ClientLeft(0)
	if b.joinable != 0 {
		t.Errorf("%d clients could join, and none is attached", b.joinable)
	}
}
