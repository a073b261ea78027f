// SPDX-License-Identifier: Apache-2.0

package chaos

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/internal/testbed"
)

// namespaces puts the broker, or everybody else, into PID namespaces of their
// own, so that numbers of processes mean nothing: an offender is thrown out and
// waits, others do not; the dead are noticed, and their batches run again.
func namespaces(r *run) error {
	if os.Getuid() != 0 {
		r.notJudged("only root can make a PID namespace")
		return nil
	}
	for _, own := range []bool{true, false} { // the broker has a namespace, or each of its peers
		if err := r.inNamespaces(own); err != nil {
			return err
		}
	}
	return nil
}

func (r *run) inNamespaces(ofBroker bool) error {
	h := &host{r: r, log: newJournal()}
	h.spec = testbed.Spec{Role: "broker", Job: r.brokerJob(), OnLog: h.log.read, Procs: 2, OwnPIDs: ofBroker}
	if err := h.startBroker(); err != nil {
		return err
	}
	var err error
	if h.before, err = testbed.UsageOf(h.broker.Pid()); err != nil {
		return err
	}
	defer h.end()
	if err := h.addWorker(theModel); err != nil {
		return err
	}
	if err := h.load(loadJob{Load: 6, Pause: 1500}); err != nil {
		return err
	}
	offender, err := r.bed.Start(testbed.Spec{Role: "hostile", Procs: 2, OwnPIDs: !ofBroker,
		Job: hostileJob{Socket: r.socket(), Seed: r.seed(), Events: 1 << 40, Seconds: 1 << 20}})
	if err != nil {
		return err
	}
	_ = unix.Setpriority(unix.PRIO_PROCESS, offender.Pid(), 19)
	const attaching = "attaching beside an offender, with PID namespaces"
	var workers, clients atomic.Int64
	r.parallel(r.events/2, r.width, func() {
		victim := func(role string, job victimJob) {
			job.Socket, job.Model, job.Seed = r.socket(), theModel, r.seed()
			p, err := r.bed.Start(testbed.Spec{Role: role, Job: job, Procs: 2, OwnPIDs: !ofBroker})
			if err != nil {
				r.fail("%v", err)
				return
			}
			defer r.bed.End(p)
			_ = p.Wait(enoughTime)
			r.check(p.Latest("dying", nil), "a %s did not die at %q: %v\n%s", role, job.Label, p.State(), p.Log())
		}
		switch r.intn(3) {
		case 0:
			victim("worker", victimJob{Label: workerLabels[r.intn(len(workerLabels))], After: r.intn(3)})
			workers.Add(1)
		case 1:
			victim("client", victimJob{Label: clientLabels[1+r.intn(len(clientLabels)-1)], After: r.intn(3)})
			clients.Add(1)
		default:
			began := time.Now()
			ctx, cancel := context.WithTimeout(r.ctx, enoughTime)
			defer cancel()
			c, err := client.Dial(ctx, theModel.Name, client.WithSocket(r.socket()), client.WithWindow(2))
			if err == nil {
				r.span(attaching, began, time.Now())
				err = ask(c, make([]int64, testbed.Width))
				_ = c.Close()
			}
			r.check(err == nil, "an honest client beside an offender: %v", err)
		}
	})
	var out int
	err = testbed.Eventually(enoughTime, func() error {
		if out = h.log.count("client disconnected: it broke the protocol"); out == 0 {
			return errors.New("the offender was never disconnected")
		}
		return nil
	})
	r.check(err == nil, "%v", err)
	r.bed.End(offender)
	h.endLoads("WorkerDied") // not WorkerHung: the dead are known to be dead
	h.settled()
	fmt.Printf("   the broker in a namespace %v: %d workers and %d clients died, the offender was disconnected %d times\n", ofBroker, workers.Load(), clients.Load(), out)
	r.inTime(attaching, 90*time.Millisecond) // who is taken for the offender waits 100 ms
	return nil
}
