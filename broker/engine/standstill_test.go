// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/policy"
)

// busyWorker is a host whose one worker has one batch, with a lease of a second.
func busyWorker(t *testing.T) (*world, *simWorker) {
	t.Helper()
	s := newModel(t, policy.New(policy.Lease(time.Second)).Over(quietModel))
	s.attachWorker()
	s.attachClient()
	s.commitOne()
	w := s.workers[0]
	w.take()
	if len(w.batches) != 1 {
		t.Fatalf("%d batches came", len(w.batches))
	}
	return s, w
}

// roundAfter is the loop's next round.
func (s *world) roundAfter(d time.Duration) {
	s.now += int64(d)
	s.l.beginRound()
	s.l.settleRound()
}

func TestAWorkerIsKilledWhenItsLeaseEnds(t *testing.T) {
	s, w := busyWorker(t)
	if s.roundAfter(time.Second - time.Millisecond); w.killed {
		t.Error("it was killed within its lease")
	}
	if s.roundAfter(time.Millisecond + mostLate); !w.killed {
		t.Error("it was not killed")
	}
}

func TestALeaseThatEndsWhileTheBrokerStandsStillIsGivenOnceMore(t *testing.T) {
	s, w := busyWorker(t)
	if s.roundAfter(time.Minute); w.killed {
		t.Error("it was killed though it may not have run")
	}
	if s.roundAfter(time.Second - time.Millisecond); w.killed {
		t.Error("it was killed within its second lease")
	}
	if s.roundAfter(time.Minute); !w.killed { // once is enough
		t.Error("it was not killed")
	}
}

func TestAWorkerThatHungUpHasTimeToTurnOutDeadAfterAStandstill(t *testing.T) {
	s, w := busyWorker(t)
	w.unkillable = true
	s.st.workerLost(w.sess, "it hung up")
	if s.roundAfter(time.Minute); w.sess.state == workerQuarantined {
		t.Error("it was quarantined though it may not have run")
	}
	if s.roundAfter(deathTime - time.Millisecond); w.sess.state == workerQuarantined {
		t.Error("it was quarantined too early")
	}
	if s.roundAfter(time.Minute); w.sess.state != workerQuarantined {
		t.Error("it was not quarantined")
	}
}
