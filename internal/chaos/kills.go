package main

import (
	"fmt"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// The bound that a death may take to be noticed and cleaned up.
const reclaimBound = 50 * time.Millisecond

// parallel runs n events, a few at a time.
func (r *run) parallel(n, width int, event func()) {
	var next, done atomic.Int64
	var wg sync.WaitGroup
	for range width {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for next.Add(1) <= int64(n) {
				event()
				r.progress(int(done.Add(1)))
			}
		}()
	}
	wg.Wait()
}

var clientLabels = []string{"dial", "claim", "write", "commit", "wait", "read", "release", "random", "random", "random"}

func killClients(r *run) error {
	h, err := r.startHost(role{}, 2)
	if err != nil {
		return err
	}
	before := vitalsOf(h.broker.pid())
	if err := h.load(role{Load: 4, Pause: 4000}); err != nil {
		return err
	}
	r.parallel(r.events, 3, func() {
		label := clientLabels[r.intn(len(clientLabels))]
		p, err := spawn(role{Kind: "client", Socket: r.socket(), Label: label, Seed: r.seed(), After: r.intn(3)}, nil, nil)
		if err != nil {
			r.fail("victim: %v", err)
			return
		}
		if !p.wait(20 * time.Second) {
			r.fail("a client that should die at %q lives: %s", label, p.last())
			p.end()
			return
		}
		_ = p.stdin.Close()
		if p.death().IsZero() {
			r.fail("a client that should die at %q ended: %s", label, p.last())
			return
		}
		if _, attached := h.log.wait("client attached", p.pid(), 0); !attached {
			r.pass() // it died before
			return
		}
		at, ok := h.log.wait("window returned", p.pid(), 5*time.Second)
		if !ok {
			r.fail("the window of a client killed at %q did not return", label)
			return
		}
		r.span("reclaim of a dead client's window", at.Sub(p.death()))
		r.pass()
	})
	h.endLoads()
	h.settled(before)
	r.inTime("reclaim of a dead client's window", reclaimBound)
	return nil
}

var workerLabels = []string{"taken", "half-written", "before word", "word to done", "after done", "random"}

func killWorkers(r *run) error {
	h, err := r.startHost(role{}, 1) // one that lives
	if err != nil {
		return err
	}
	before := vitalsOf(h.broker.pid())
	for range 2 {
		if err := h.load(role{Load: 12, Pause: 1000}); err != nil {
			return err
		}
	}
	r.parallel(r.events, 3, func() {
		label := workerLabels[r.intn(len(workerLabels))]
		p, err := spawn(role{Kind: "worker", Socket: r.socket(), Label: label, Seed: r.seed(), After: r.intn(8)}, func([]byte) {}, nil)
		if err != nil {
			r.fail("victim: %v", err)
			return
		}
		if !p.wait(30 * time.Second) {
			r.fail("a worker that should die at %q lives: %s", label, p.last())
			p.end()
			return
		}
		_ = p.stdin.Close()
		if p.death().IsZero() {
			r.fail("a worker that should die at %q ended: %s", label, p.last())
			return
		}
		at, ok := h.log.wait("worker left", p.pid(), 5*time.Second)
		if !ok {
			r.fail("the broker did not notice the death of a worker at %q", label)
			return
		}
		r.span("requeue of a dead worker's batch", at.Sub(p.death()))
		r.pass()
	})
	h.endLoads("WorkerDied")
	h.settled(before)
	r.inTime("requeue of a dead worker's batch", reclaimBound)
	return nil
}

// stopWorkers stops workers for longer or shorter than their lease.
func stopWorkers(r *run) error {
	const lease = 80 * time.Millisecond
	h, err := r.startHost(role{Lease: int(lease / time.Millisecond)}, 1)
	if err != nil {
		return err
	}
	before := vitalsOf(h.broker.pid())
	if err := h.load(role{Load: 12, Pause: 1000}); err != nil {
		return err
	}
	killed := atomic.Int64{}
	r.parallel(r.events, 3, func() {
		p, err := h.worker(role{Seed: r.seed()})
		if err != nil {
			r.fail("worker: %v", err)
			return
		}
		defer p.end()
		if !p.said("attached", 10*time.Second) {
			r.fail("worker does not attach: %s", p.last())
			return
		}
		time.Sleep(time.Duration(r.intn(20)) * time.Millisecond)
		p.signal(syscall.SIGSTOP)
		time.Sleep(lease + time.Duration(r.intn(int(lease))))
		p.signal(syscall.SIGCONT)
		if p.wait(time.Duration(r.intn(100)) * time.Millisecond) {
			killed.Add(1) // it had a batch: the broker did not wait for it
		}
		r.pass()
	})
	h.endLoads("WorkerDied")
	fmt.Printf("   %d of the stopped workers had a batch and were killed by the broker\n", killed.Load())
	r.check(killed.Load() > 0, "no worker was killed for outliving its lease")
	h.settled(before)
	return nil
}
