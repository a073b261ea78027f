// SPDX-License-Identifier: Apache-2.0

package chaos

import (
	"fmt"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/ringbatch/ringbatch/test/testbed"
)

// reclaimBound is what docs/reliability.md promises: so long a death may take
// to be noticed and cleaned up.
const reclaimBound = 50 * time.Millisecond

var clientLabels = []string{"dial", "claim", "write", "commit", "wait", "read", "release", "random", "random", "random"}

var workerLabels = []string{"taken", "half-written", "before word", "word to done", "after done", "random"}

// dies starts a victim and waits until it is dead; it says when that was.
func (r *run) dies(role string, job victimJob) (pid int, at time.Time, ok bool) {
	p := r.victim(role, job)
	defer r.bed.End(p)
	if p.Wait(enoughTime) == testbed.ErrRunning {
		r.fail("a %s that should die at %q lives\n%s", role, job.Label, p.Log())
		return 0, at, false
	}
	var nanos int64
	if !p.Latest("dying", &nanos) {
		r.fail("a %s that should die at %q ended: %v", role, job.Label, p.Expect("dying", nil, 0))
		return 0, at, false
	}
	return p.Pid(), time.Unix(0, nanos), true
}

// workerDies has a worker die, and keeps how long it took the broker to notice.
func (h *host) workerDies(span string, job victimJob) {
	pid, died, ok := h.r.dies("worker", job)
	if !ok {
		return
	}
	at, ok := h.log.wait("worker left", pid, enoughTime)
	h.r.check(ok, "the broker did not notice the death of a worker at %q", job.Label)
	if ok && job.Label != "hangs up" { // then it leaves when the broker has seen the end of the connection
		h.r.span(span, died, at)
	}
}

func killClients(r *run) {
	h := r.startHost(r.withNeighbour(), 2, testbed.Spec{})
	h.loadEveryKind(2, 8*time.Millisecond, patience)
	h.neighbourhood()
	dies := []func(step string, after int) (int, time.Time, bool){func(step string, after int) (int, time.Time, bool) {
		return r.dies("client", victimJob{Label: step, After: after})
	}}
	for _, kind := range findPeers().kinds[1:] {
		dies = append(dies, r.victims(kind).dies)
	}
	const reclaim = "reclaim of a dead client's window"
	var early atomic.Int64
	r.untilEnough(reclaim, func() {
		label := clientLabels[r.intn(len(clientLabels))]
		pid, died, ok := dies[r.intn(len(dies))](label, r.intn(3))
		if !ok {
			return
		}
		if _, attached := h.log.wait("client attached", pid, 0); label == "dial" && !attached {
			early.Add(1) // its window, if it has one, is counted below
			r.pass()
			return
		}
		at, ok := h.log.wait("window returned", pid, enoughTime)
		if !ok {
			r.fail("the window of a client killed at %q did not return", label)
			return
		}
		r.span(reclaim, died, at)
		r.pass()
	})
	h.endLoads()
	h.settled()
	err := testbed.Eventually(enoughTime, func() error { // the log comes a moment after the books
		if attached, returned := h.log.count("client attached"), h.log.count("window returned"); attached != returned {
			return fmt.Errorf("%d clients attached, %d windows returned", attached, returned)
		}
		return nil
	})
	r.check(err == nil, "%v", err)
	fmt.Printf("   %d clients died while they dialed, before they had a window\n", early.Load())
	r.inTime(reclaim, reclaimBound)
}

func killWorkers(r *run) {
	h := r.startHost(r.withNeighbour(), 1, testbed.Spec{}) // the worker lives
	h.loadEveryKind(8, 2*time.Millisecond, patience)
	h.neighbourhood()
	const requeue = "requeue of a dead worker's batch"
	r.untilEnough(requeue, func() {
		h.workerDies(requeue, victimJob{Label: workerLabels[r.intn(len(workerLabels))], After: r.intn(8)})
	})
	h.endLoads("WorkerDied")
	h.settled()
	r.inTime(requeue, reclaimBound)
}

// stopWorkers stops workers for longer than their lease. One that had a batch
// is killed; one that had none goes on as if nothing had happened.
func stopWorkers(r *run) {
	const lease = 120 * time.Millisecond
	job := r.brokerJob()
	job.Models[0].Lease = lease
	h := r.startHost(job, 0, testbed.Spec{})
	keep := h.keepWorkers(1) // a busy machine can make any worker outlive that lease
	defer keep()
	h.load(loadJob{Load: 12, Pause: 1000})
	var killed atomic.Int64
	r.parallel(r.events, width, func() {
		if r.stopped(h, lease+time.Duration(r.intn(int(lease)))) {
			killed.Add(1)
		}
	})
	h.endLoads("WorkerDied")
	fmt.Printf("   %d of the stopped workers had a batch and were killed by the broker\n", killed.Load())
	r.check(killed.Load() > 0, "no worker was killed for outliving its lease")
	h.settled()
}

// stopped stops a worker for a while, and checks that it then goes on and ends
// well, or was killed by the broker; it says whether it was.
func (r *run) stopped(h *host, d time.Duration) (killed bool) {
	p := r.victim("worker", victimJob{})
	defer r.bed.End(p)
	if err := p.Expect("attached", nil, enoughTime); err != nil && p.Running() {
		r.fail("worker does not attach: %v", err)
		return false
	} // a busy machine may have stopped it past its lease already
	time.Sleep(time.Duration(r.intn(20)) * time.Millisecond)
	p.Signal(syscall.SIGSTOP)
	time.Sleep(d)
	p.Signal(syscall.SIGCONT)
	_ = p.Wait(time.Duration(r.intn(100)) * time.Millisecond)
	if err := p.Stop(enoughTime); !p.Killed() {
		r.check(err == nil, "a stopped worker ended with %v\n%s", err, p.Log())
		return false
	}
	r.check(h.killed(p), "a stopped worker was killed, but not by the broker")
	return true
}
