// SPDX-License-Identifier: Apache-2.0

package chaos

import (
	"errors"
	"fmt"
	"time"

	"github.com/ringbatch/ringbatch/test/testbed"
	"github.com/ringbatch/ringbatch/worker"
)

// A worker's function says the first to a poisonous request. A broken worker says the
// second to every request.
var (
	errRaised = errors.New("this input is poisonous")
	errBroken = errors.New("this worker is broken")
)

// raises fails a batch as a whole if the worker is broken, or if a request of the
// batch makes its function raise.
func (p *player) raises(b *worker.Batch, label string) bool {
	err := error(nil)
	if label == "raises" {
		err = errBroken
	}
	for i := range b.Rows() {
		if worker.Row[int64](b.Input(0), i)[0] == cmdRaise && err == nil {
			err = errRaised
		}
	}
	if err != nil {
		b.FailAll(err)
		b.Complete()
	}
	return err != nil
}

// raisingWorkers starts workers that raise at every batch from some time on, while some
// inputs make every worker raise. Only these inputs may fail.
func raisingWorkers(r *run) {
	h := r.startHost(r.withNeighbour(), 2, testbed.Spec{})
	h.loadEveryKind(4, time.Millisecond, patience)
	h.load(loadJob{Load: 8, Pause: 1000, Raise: 0.02})
	h.neighbourhood()
	const noticed = "from attaching to the suspension of a worker that raises"
	r.parallel(r.events, 1, func() {
		p := r.victim("worker", victimJob{Label: "raises", After: r.intn(20)})
		defer r.bed.End(p)
		attached, ok := h.log.wait("worker attached", p.Pid(), enoughTime)
		suspended, noted := h.log.wait("worker suspended: it failed batches that other workers ran", p.Pid(), enoughTime)
		if !ok || !noted {
			r.fail("a worker that raises at every batch was not suspended")
			return
		}
		r.span(noticed, attached, suspended)
		r.pass()
	})
	sum := h.endLoads() // no innocent request may fail
	r.check(sum.Poisoned > 0, "nothing was poisonous")
	all, err := h.stats()
	r.must(err)
	fmt.Printf("   %d requests were run again in smaller batches, workers were suspended %d times\n",
		all[0].Isolated, all[0].WorkersSuspended)
	for _, w := range h.workers {
		_, suspended := h.log.wait("worker suspended: it failed batches that other workers ran", w.Pid(), 0)
		r.check(!suspended, "a healthy worker was suspended")
	}
	h.settled()
}
