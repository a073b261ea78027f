package chaos

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/internal/testbed"
	"github.com/ringbatch/ringbatch/stats"
)

// theModel is what everybody uses here.
var theModel = testbed.Model{Name: "chaos", Slots: 512, MaxBatch: 8, Wait: 300 * time.Microsecond, Lease: 10 * time.Second}

// host is a broker with its workers and honest clients, as processes.
type host struct {
	r       *run
	spec    testbed.Spec // of the broker
	broker  *testbed.Process
	before  testbed.Usage // of the first broker, when nobody was attached
	log     *journal
	workers []*testbed.Process // that should live
	loads   []*testbed.Process
}

// brokerJob is that of a broker with the model, whose log is kept.
func (r *run) brokerJob() testbed.BrokerJob {
	return testbed.BrokerJob{Socket: r.socket(), Models: []testbed.Model{theModel}, DrainTime: 5 * time.Second, Journal: true}
}

// startHost starts a broker and some workers that live.
func (r *run) startHost(job testbed.BrokerJob, workers int, limits testbed.Limits) (*host, error) {
	h := &host{r: r, log: newJournal()}
	h.spec = testbed.Spec{Role: "broker", Job: job, Limits: limits, OnLog: h.log.read, Procs: 2}
	if err := h.startBroker(); err != nil {
		return nil, err
	}
	var err error
	if h.before, err = testbed.UsageOf(h.broker.Pid()); err != nil {
		return nil, err
	}
	for range workers {
		w, err := r.victim("worker", victimJob{})
		if err != nil {
			return nil, err
		}
		h.workers = append(h.workers, w)
		if err := w.Expect("attached", nil, 10*time.Second); err != nil {
			return nil, err
		}
	}
	return h, nil
}

func (h *host) startBroker() (err error) {
	if h.broker, err = h.r.bed.Start(h.spec); err != nil {
		return err
	}
	return h.broker.Expect("ready", nil, 10*time.Second)
}

// end ends all of them before the campaign does.
func (h *host) end() { h.r.bed.End(slices.Concat(h.loads, h.workers, []*testbed.Process{h.broker})...) }

// keepWorkers has n workers at all times, until stop is called: for each that
// dies it starts another.
func (h *host) keepWorkers(n int) (stop func()) {
	stopping, ended := make(chan struct{}), make(chan struct{})
	for range n {
		go func() {
			defer func() { ended <- struct{}{} }()
			for {
				p, err := h.r.victim("worker", victimJob{})
				if err != nil {
					h.r.fail("worker: %v", err)
					return
				}
				select {
				case <-p.Ended():
					h.r.bed.End(p)
				case <-stopping:
					h.r.bed.End(p)
					return
				}
			}
		}()
	}
	return func() {
		close(stopping)
		for range n {
			<-ended
		}
	}
}

// load starts a process of honest clients.
func (h *host) load(job loadJob) error {
	job.Socket, job.Seed = h.r.socket(), h.r.seed()
	p, err := h.r.bed.Start(testbed.Spec{Role: "load", Job: job, Procs: 2})
	if err != nil {
		return err
	}
	h.loads = append(h.loads, p)
	return p.Expect("ready", nil, 20*time.Second)
}

// endLoads stops the honest clients and checks what they saw. allowed are the
// named errors that this campaign may cause.
func (h *host) endLoads(allowed ...string) (sum tally) {
	r := h.r
	sum.Named = map[string]int{}
	for _, p := range h.loads {
		var t tally
		err := errors.Join(p.Stop(10*time.Second), p.Expect("tally", &t, 0))
		r.check(err == nil, "a load: %v", err)
		r.check(t.OK > 0, "a load got no answer at all: %+v", t)
		for _, w := range append(t.Wrong, t.Late...) {
			r.fail("load: %s", w)
		}
		sum.add(&t)
	}
	h.loads = nil
	if sum.Stood > patience {
		allowed = append(allowed, "Expired")
	}
	for name, n := range sum.Named {
		r.check(slices.Contains(allowed, name), "%d honest requests ended with %s", n, name)
	}
	fmt.Printf("   honest requests: %d right, %v", sum.OK, sum.Named)
	if sum.Poisoned > 0 {
		fmt.Printf(", %d poisonous", sum.Poisoned)
	}
	if sum.Stood > 0 {
		fmt.Printf("; the machine stood still for %v", sum.Stood.Round(time.Millisecond))
	}
	fmt.Println()
	return sum
}

// stats asks the broker.
func (h *host) stats() (*stats.Model, error) {
	ctx, cancel := context.WithTimeout(h.r.ctx, 5*time.Second)
	defer cancel()
	s, err := admin.New(h.r.socket()).Stats(ctx)
	if err != nil {
		return nil, err
	}
	if len(s.Models) != 1 {
		return nil, fmt.Errorf("statistics of %d models", len(s.Models))
	}
	return &s.Models[0], nil
}

// memoryKept is how much more memory than at first the broker may have at
// the end: Go returns it late.
const memoryKept = 32 << 20

// settled checks, when all clients are gone, that the broker's books are
// empty, that every window came back, and that it has no more descriptors,
// mappings, threads and memory than at first.
func (h *host) settled() {
	r := h.r
	var s *stats.Model
	var now testbed.Usage
	err := testbed.Eventually(5*time.Second, func() (err error) {
		if s, err = h.stats(); err != nil {
			return err
		}
		if err := testbed.Settled(s); err != nil {
			return err
		}
		if now, err = testbed.UsageOf(h.broker.Pid()); err != nil {
			return err
		}
		return now.Within(h.before.WithWorkers(len(s.Workers)))
	})
	r.check(err == nil, "the broker at the end: %v", err)
	if err != nil {
		return
	}
	r.check(now.RSS <= h.before.RSS+memoryKept, "the broker has %d MiB at the end, %d at first", now.RSS>>20, h.before.RSS>>20)
	fmt.Printf("   broker at the end: %d requests, %d batches, %d requeued; fds %d → %d, threads %d → %d, RSS %d → %d MiB\n",
		s.Requests, s.Batches, s.Requeued, h.before.FDs, now.FDs, h.before.Threads, now.Threads, h.before.RSS>>20, now.RSS>>20)
}
