// SPDX-License-Identifier: Apache-2.0

package chaos

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/test/testbed"
)

// namespaces puts the broker, or each peer, into another PID namespace, where process
// numbers mean nothing. The broker must disconnect only the offender, notice deaths, and
// run the batches of dead workers again.
func namespaces(r *run) {
	for _, own := range []bool{true, false} { // the broker has a namespace, or each of its peers
		r.inNamespaces(own)
	}
}

func (r *run) inNamespaces(ofBroker bool) {
	h := r.startHost(r.brokerJob(), 1, testbed.Spec{OwnPIDs: ofBroker})
	defer h.end()
	h.load(loadJob{Load: 6, Pause: 1500})
	offender := r.start(testbed.Spec{Role: "hostile", Procs: 2, OwnPIDs: !ofBroker,
		Job: hostileJob{Socket: r.socket(), Seed: r.seed(), Events: 1 << 40, Seconds: 1 << 20}})
	_ = unix.Setpriority(unix.PRIO_PROCESS, offender.Pid(), 19)
	const attaching = "attaching beside an offender, with PID namespaces"
	var workers, clients atomic.Int64
	r.parallel(r.events/2, width, func() {
		switch r.intn(3) {
		case 0:
			r.dies("worker", victimJob{OwnPIDs: !ofBroker, Label: workerLabels[r.intn(len(workerLabels))], After: r.intn(3)})
			workers.Add(1)
		case 1:
			r.dies("client", victimJob{OwnPIDs: !ofBroker, Label: clientLabels[1+r.intn(len(clientLabels)-1)], After: r.intn(3)})
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
	err := testbed.Eventually(enoughTime, func() error {
		if out = h.log.count("client disconnected: it broke the protocol"); out == 0 {
			return errors.New("the offender was never disconnected")
		}
		return nil
	})
	r.check(err == nil, "%v", err)
	r.bed.End(offender)
	h.endLoads("WorkerDied") // not WorkerHung: the dead are known to be dead
	h.settled()
	fmt.Printf("   the broker in a namespace %v: %d workers and %d clients died, the offender was disconnected %d times\n",
		ofBroker, workers.Load(), clients.Load(), out)
	r.inTime(attaching, 90*time.Millisecond) // an offender waits 100 ms
}
