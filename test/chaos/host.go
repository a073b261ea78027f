// SPDX-License-Identifier: Apache-2.0

package chaos

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/admin/stats"
	"github.com/ringbatch/ringbatch/test/testbed"
)

// theModel is the model that the campaigns attack.
var theModel = testbed.Model{Name: "chaos", Slots: 512, MaxBatch: 8, Wait: 300 * time.Microsecond, Lease: 10 * time.Second}

// neighbour is another model on the same broker. Its clients should not notice an
// attack on the first.
var neighbour = testbed.Model{Name: "neighbour", Slots: 128, MaxBatch: 8, Wait: 300 * time.Microsecond, Lease: 10 * time.Second}

// host is a broker with its workers and honest clients, as processes.
type host struct {
	r       *run
	spec    testbed.Spec // of the broker
	broker  *testbed.Process
	before  testbed.Usage // of the first broker, before the first peer attached
	log     *journal
	workers []*testbed.Process // that should live
	loads   []*testbed.Process
	takes   time.Duration // a batch of the workers that keepWorkers starts
	keeps   int64         // growth of the broker that is allowed at the end; at least memoryKept
}

// brokerJob describes a broker with the model, whose log is kept.
func (r *run) brokerJob() testbed.BrokerJob {
	return testbed.BrokerJob{Socket: r.socket(), Models: []testbed.Model{theModel}, DrainTime: 5 * time.Second, Journal: true}
}

// withNeighbour is brokerJob with a second model.
func (r *run) withNeighbour() testbed.BrokerJob {
	job := r.brokerJob()
	job.Models = append(job.Models, neighbour)
	return job
}

// startHost starts a broker and some workers that live. how sets the broker's user
// and namespaces.
func (r *run) startHost(job testbed.BrokerJob, workers int, how testbed.Spec) *host {
	h := &host{r: r, log: newJournal(), spec: how}
	h.spec.Role, h.spec.Job, h.spec.OnLog, h.spec.Procs = "broker", job, h.log.read, 2
	h.startBroker()
	h.before = r.usage(h.broker)
	for range workers {
		h.addWorker(theModel)
	}
	return h
}

// startControl starts a host that no attack reaches.
func (r *run) startControl(job testbed.BrokerJob, workers int, load loadJob) *host {
	job.Socket = r.bed.Path("control.sock")
	h := r.startHost(job, workers, testbed.Spec{})
	h.load(load)
	return h
}

// addWorker starts a worker that lives.
func (h *host) addWorker(m testbed.Model) {
	w := h.r.victim("worker", victimJob{Socket: h.socket(), Model: m})
	h.workers = append(h.workers, w)
	h.r.must(w.Expect("attached", nil, enoughTime))
}

func (h *host) startBroker() {
	h.broker = h.r.start(h.spec)
	h.r.must(h.broker.Expect("ready", nil, enoughTime))
}

// end kills the host's processes before the campaign ends.
func (h *host) end() { h.r.bed.End(slices.Concat(h.loads, h.workers, []*testbed.Process{h.broker})...) }

// keepWorkers keeps n workers until stop is called: it replaces each worker that
// dies.
func (h *host) keepWorkers(n int) (stop func()) {
	stopping, ended := make(chan struct{}), make(chan struct{})
	for range n {
		go func() {
			defer func() { ended <- struct{}{} }()
			h.r.guard(func() { h.keepWorker(stopping) })
		}()
	}
	return func() {
		close(stopping)
		for range n {
			<-ended
		}
	}
}

const workerStart = "start of a worker"

// keepWorker replaces its worker whenever the worker dies.
func (h *host) keepWorker(stopping <-chan struct{}) {
	for {
		from := time.Now()
		p := h.r.victim("worker", victimJob{Socket: h.socket(), Takes: h.takes})
		if p.Expect("attached", nil, enoughTime) == nil {
			h.r.span(workerStart, from, time.Now())
		}
		select {
		case <-p.Ended():
			h.r.bed.End(p)
		case <-stopping:
			h.r.bed.End(p)
			return
		}
	}
}

// load starts a process of honest clients.
func (h *host) load(job loadJob) {
	job.Socket, job.Seed = h.socket(), h.r.seed()
	if job.Model == "" {
		job.Model = theModel.Name
	}
	h.addLoad(h.r.start(testbed.Spec{Role: "load", Job: job, Procs: 2}))
}

func (h *host) addLoad(p *testbed.Process) {
	h.loads = append(h.loads, p)
	h.r.must(p.Expect("ready", nil, enoughTime))
}

// neighbourhood gives the second model a worker and honest clients.
func (h *host) neighbourhood() {
	h.addWorker(neighbour)
	h.load(loadJob{Model: neighbour.Name, Load: 4, Pause: 4000})
}

// endLoads stops the honest clients and checks their tallies. allowed are the
// named errors that this campaign may cause.
func (h *host) endLoads(allowed ...string) (sum tally) {
	r := h.r
	sum.Named = map[string]int{}
	for _, p := range h.loads {
		var t tally
		err := errors.Join(p.Stop(enoughTime), p.Expect("tally", &t, 0))
		r.check(err == nil, "a load: %v", err)
		r.check(t.OK > 0, "a load got no answer at all: %+v", t)
		for _, w := range t.Wrong {
			r.fail("load: %s", w)
		}
		if most := r.stalls.Longest(r.born, time.Now()); len(t.Late) > 0 && most > grace/2 {
			r.notJudged("load: %s; but a CPU stood still for %v", t.Late[0], most)
		} else {
			for _, l := range t.Late {
				r.fail("load: %s", l)
			}
		}
		sum.add(&t)
	}
	h.loads = nil
	if sum.Stood > patience {
		allowed = append(allowed, "Expired", "Overloaded")
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

// stats asks the broker; the attacked model comes first.
func (h *host) stats() ([]stats.Model, error) {
	ctx, cancel := context.WithTimeout(h.r.ctx, enoughTime)
	defer cancel()
	s, err := admin.New(h.socket()).Stats(ctx)
	if err != nil {
		return nil, err
	}
	slices.SortFunc(s.Models, func(a, b stats.Model) int { return strings.Compare(a.Name, b.Name) })
	if len(s.Models) == 0 || s.Models[0].Name != theModel.Name {
		return nil, fmt.Errorf("no statistics of %s", theModel.Name)
	}
	return s.Models, nil
}

func (h *host) socket() string { return h.spec.Job.(testbed.BrokerJob).Socket }

// memoryKept is how much the broker may have grown at the end: Go returns memory
// late.
const memoryKept = 32 << 20

// settled checks, after all clients have left, that the broker's books are empty, that
// every window came back, and that descriptors, mappings, threads and memory are back
// to the start.
func (h *host) settled() {
	r := h.r
	var all []stats.Model
	var now testbed.Usage
	err := testbed.Eventually(enoughTime, func() (err error) {
		if all, err = h.stats(); err != nil {
			return err
		}
		workers := 0
		for i := range all {
			if err := testbed.Settled(&all[i]); err != nil {
				return err
			}
			workers += len(all[i].Workers)
		}
		if now, err = testbed.UsageOf(h.broker.Pid()); err != nil {
			return err
		}
		if most := h.before.RSS + max(memoryKept, h.keeps); now.RSS > most {
			return fmt.Errorf("it has %d MiB, %d at first", now.RSS>>20, h.before.RSS>>20)
		}
		return now.Within(h.before.WithWorkers(workers))
	})
	r.check(err == nil, "the broker at the end: %v", err)
	if err != nil {
		return
	}
	s := &all[0]
	fmt.Printf("   broker at the end: %d requests, %d batches, %d requeued; fds %d → %d, threads %d → %d, RSS %d → %d MiB\n",
		s.Requests, s.Batches, s.Requeued, h.before.FDs, now.FDs, h.before.Threads, now.Threads, h.before.RSS>>20, now.RSS>>20)
}
