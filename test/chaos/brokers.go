// SPDX-License-Identifier: Apache-2.0

package chaos

import (
	"context"
	"time"

	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/test/testbed"
)

// killBrokers kills the broker under load and starts it again. Requests of
// the old one end with BrokerGone; clients and workers attach again by
// themselves.
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
		h.r.bed.End(h.broker)
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

// poisonBatches has some inputs kill the worker that runs them.
func poisonBatches(r *run) {
	h := r.startHost(r.brokerJob(), 0, testbed.Spec{})
	stop := h.keepWorkers(3)
	defer stop()
	for _, percent := range []float64{0.01, 0.03, 0.1} {
		h.load(loadJob{Load: 8, Pause: 500, Poison: percent})
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
