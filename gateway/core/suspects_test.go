// SPDX-License-Identifier: Apache-2.0

package core

import (
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/tensor"
)

func TestTheFirstSuspectsHaveAClientEachAndTheOthersShareOne(t *testing.T) {
	g, err := New(Config{})
	must.Do(t, err)
	sig, err := tensor.ParseSignature([]string{"x:f32[4]"}, []string{"y:f32[4]"})
	must.Do(t, err)
	k := NewModel(g, &admin.Model{Name: "m", Signature: sig})
	callers := make([]*Usage, suspectLanes+1)
	for i := range callers {
		callers[i] = &Usage{}
		for range sparedFailures {
			callers[i].failed()
		}
		if lane, _, _ := k.suspectLane(callers[i]); lane != nil {
			t.Errorf("caller %d has its own lane after %d failures", i, sparedFailures)
		}
		callers[i].failed()
	}
	lanes := map[*lane]int{}
	for i, u := range callers {
		lane, window, alone := k.suspectLane(u)
		if again, _, _ := k.suspectLane(u); again != lane || lane == nil || window == 0 || alone != (i < suspectLanes-1) {
			t.Errorf("caller %d: lane %p and then %p, %d slots, alone: %v", i, lane, again, window, alone)
		}
		lanes[lane]++
	}
	if len(lanes) != suspectLanes {
		t.Errorf("%d callers have %d lanes", len(callers), len(lanes))
	}
	first, _, _ := k.suspectLane(callers[0])
	callers[0].until.Store(time.Now().Add(sparedFailures * failureTime).UnixNano()) // it has behaved
	if lane, _, _ := k.suspectLane(callers[0]); lane != nil {
		t.Error("a caller that behaved keeps its lane")
	}
	if lane, _, alone := k.suspectLane(callers[suspectLanes]); lane != first || !alone {
		t.Error("another suspect does not get the free lane")
	}
	k.suspects.noteFull()
	if lane, _, _ := k.suspectLane(callers[1]); lane != nil {
		t.Error("a full ring is asked for every request")
	}
}

func TestAnAddressIsRememberedUntilItsFailuresAreForgotten(t *testing.T) {
	l := newLimits(&Config{})
	u := l.join("192.0.2.1")
	u.failed()
	l.leave("192.0.2.1")
	if l.join("192.0.2.1") != u {
		t.Fatal("another connection makes it a caller in good standing")
	}
	l.leave("192.0.2.1")
	timer := u.forgets
	if l.join("192.0.2.1"); timer == nil {
		t.Fatal("no timer forgets it")
	}
	if l.leave("192.0.2.1"); u.forgets != timer {
		t.Error("each connection has a timer")
	}
	l.join("192.0.2.1")
	u.until.Store(1)
	if l.leave("192.0.2.1"); len(l.byName) != 0 {
		t.Error("it is never forgotten")
	}
}

func TestACallNeverEntersAClientThatIsBeingClosed(t *testing.T) {
	l, old, now := &lane{}, &attachment{}, &attachment{}
	old.retired.Store(true)
	old.calls.Store(1) // of another call, so that it stays open
	l.live.Store(old)
	entered := make(chan *attachment)
	go func() {
		a, _ := l.client(t.Context(), nil, 0)
		entered <- a
	}()
	time.Sleep(10 * time.Millisecond)
	l.live.Store(now)
	if a := <-entered; a != now || old.calls.Load() != 1 || now.calls.Load() != 1 {
		t.Errorf("it entered the new one: %v; calls %d and %d", a == now, old.calls.Load(), now.calls.Load())
	}
}
