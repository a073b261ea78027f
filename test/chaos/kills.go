// SPDX-License-Identifier: Apache-2.0

package chaos

import (
	"context"
	"fmt"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/test/testbed"
)

// reclaimBound is the promise of docs/reliability.md: the broker notices a death and
// cleans up within this time.
const reclaimBound = 50 * time.Millisecond

var clientLabels = []string{"dial", "claim", "write", "commit", "wait", "read", "release", "random", "random", "random"}

var workerLabels = []string{"taken", "half-written", "before word", "word to done", "after done", "random"}

// dies starts a victim, waits until it is dead, and returns the time of its death.
func (r *run) dies(role string, job victimJob) (pid int, at time.Time, ok bool) {
	return r.died(r.victim(role, job), role, job.Label)
}

func (r *run) died(p *testbed.Process, role, label string) (pid int, at time.Time, ok bool) {
	defer r.bed.End(p)
	if p.Wait(enoughTime) == testbed.ErrRunning {
		r.fail("a %s that should die at %q lives\n%s", role, label, p.Log())
		return 0, at, false
	}
	var nanos int64
	if !p.Latest("dying", &nanos) {
		r.fail("a %s that should die at %q ended: %v\n%s", role, label, p.Expect("dying", nil, 0), p.Log())
		return 0, at, false
	}
	return p.Pid(), time.Unix(0, nanos), true
}

// workerDies makes a worker die and keeps how long the broker took to notice.
func (h *host) workerDies(span string, job victimJob) (ok bool) {
	pid, died, ok := h.r.dies("worker", job)
	if !ok {
		return false
	}
	at, ok := h.log.wait("worker left", pid, enoughTime)
	h.r.check(ok, "the broker did not notice the death of a worker at %q", job.Label)
	if ok && job.Label != "hangs up" { // a worker that hangs up leaves before it dies
		h.r.span(span, died, at)
	}
	return ok
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
			early.Add(1) // a window of this client is counted below
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

// stopWorkers stops workers for longer than their lease. The broker kills a worker
// that had a batch; an idle worker goes on as if nothing had happened.
func stopWorkers(r *run) {
	const lease = 120 * time.Millisecond
	job := r.brokerJob()
	job.Models[0].Lease = lease
	h := r.startHost(job, 0, testbed.Spec{})
	stop := h.keepWorkers(1) // on a busy machine any worker can outlive that lease
	defer stop()
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

// stopped stops a worker for a while. The worker must then go on and end well, or
// have been killed by the broker.
func (r *run) stopped(h *host, d time.Duration) (killed bool) {
	p := r.victim("worker", victimJob{})
	defer r.bed.End(p)
	if err := p.Expect("attached", nil, enoughTime); err != nil && p.Running() {
		r.fail("worker does not attach: %v", err)
		return false
	} // on a busy machine the broker may have killed it already
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

// killed reports whether the broker killed a process, which had outlived its lease.
func (h *host) killed(p *testbed.Process) bool {
	if p.Wait(enoughTime) == testbed.ErrRunning || !p.Killed() {
		return false
	}
	_, ok := h.log.wait("worker killed", p.Pid(), enoughTime)
	return ok
}

// killBrokers kills the broker under load and starts it again. Requests of the
// old broker end with BrokerGone; clients and workers attach again by themselves.
func killBrokers(r *run) {
	h := r.startHost(r.withNeighbour(), 2, testbed.Spec{})
	h.loadEveryKind(4, 3*time.Millisecond, patience)
	h.neighbourhood()
	dial, cancel := context.WithTimeout(r.ctx, enoughTime)
	defer cancel()
	c, err := client.Dial(dial, theModel.Name, client.WithSocket(r.socket()), client.WaitForModel())
	r.must(err)
	defer c.Close()
	x := make([]int64, testbed.Width)
	for i := range r.events {
		time.Sleep(time.Duration(r.intn(60)) * time.Millisecond)
		r.bed.End(h.broker)
		start := time.Now()
		h.startBroker()
		for {
			x[1] = int64(i)
			if err = ask(c, x); err == nil || time.Since(start) > enoughTime {
				break
			}
		}
		r.span("broker's death to the first answer of the next", start, time.Now())
		r.check(err == nil, "no answer after the broker's restart %d: %v", i, err)
		r.progress(i + 1)
	}
	h.endLoads("BrokerGone")
	_ = c.Close()
	h.settled()
}

// standstill stops the broker for longer than requests may take. Requests of every
// kind of client still end by their own deadlines, and all go on afterwards.
func standstill(r *run) {
	h := r.startHost(r.brokerJob(), 2, testbed.Spec{})
	const timeout = 200 * time.Millisecond
	h.loadEveryKind(3, 2*time.Millisecond, timeout)
	for i := range r.events {
		time.Sleep(time.Duration(50+r.intn(150)) * time.Millisecond)
		h.broker.Signal(syscall.SIGSTOP)
		time.Sleep(timeout + time.Duration(r.intn(700))*time.Millisecond)
		h.broker.Signal(syscall.SIGCONT)
		r.progress(i + 1)
	}
	sum := h.endLoads("Expired", "Overloaded", "Timeout", "Full", "QueueTimeout")
	fmt.Printf("   deadlines of %v; the slowest request took %v\n", timeout, sum.Slowest.Round(time.Millisecond))
	late := sum.Named["Expired"] + sum.Named["Overloaded"] + sum.Named["Timeout"] + sum.Named["Full"]
	r.check(late > 0, "no deadline passed while the broker stood still")
	h.settled()
}

// poisonBatches sends inputs that kill the worker that runs them.
func poisonBatches(r *run) {
	h := r.startHost(r.brokerJob(), 0, testbed.Spec{})
	stop := h.keepWorkers(3)
	defer stop()
	for _, share := range []float64{0.01, 0.03, 0.1} {
		h.load(loadJob{Load: 8, Pause: 500, Poison: share})
	}
	for batches := 0; batches < r.events; time.Sleep(50 * time.Millisecond) {
		s, err := h.stats()
		r.must(err)
		batches = int(s[0].Batches)
		r.progress(batches)
	}
	sum := h.endLoads() // no innocent request may fail
	r.check(sum.Poisoned > 0, "nothing was poisonous")
	r.mu.Lock()
	r.score.passed += sum.OK + sum.Poisoned
	r.mu.Unlock()
	h.settled()
}

// signalStorm interrupts every system call of every process.
func signalStorm(r *run) {
	h := r.startHost(r.brokerJob(), 2, testbed.Spec{})
	h.load(loadJob{Load: 4, Pause: 500})
	all := append([]*testbed.Process{h.broker, h.loads[0]}, h.workers...)
	storm := []syscall.Signal{unix.SIGURG, unix.SIGPROF, unix.SIGUSR1, unix.SIGCHLD}
	for sent := 0; sent < r.events && r.ctx.Err() == nil; {
		for _, p := range all {
			p.Signal(storm[r.intn(len(storm))])
			sent++
		}
		time.Sleep(300 * time.Microsecond)
		r.progress(sent)
	}
	for _, p := range all {
		r.check(p.Running(), "%s died of signals: %v\n%s", p, p.State(), p.Log())
	}
	fmt.Printf("   %.1f signals per millisecond\n", float64(r.events)/float64(time.Since(r.born).Milliseconds()))
	h.endLoads()
	h.settled()
}
