package main

import (
	"context"
	"fmt"
	"syscall"
	"time"

	"github.com/ringbatch/ringbatch/client"
)

// killBrokers kills the broker under load and starts it again. Requests of
// the old one end with BrokerGone; clients and workers attach again by
// themselves.
func killBrokers(r *run) error {
	h, err := r.startHost(role{}, 2)
	if err != nil {
		return err
	}
	if err := h.load(role{Load: 8, Pause: 2000}); err != nil {
		return err
	}
	dial, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	c, err := client.Dial(dial, modelName, client.WithSocket(r.socket()), client.WaitForModel())
	if err != nil {
		return err
	}
	defer c.Close()
	x := make([]int64, width)
	ro := role{}
	for i := range r.events {
		time.Sleep(time.Duration(r.intn(60)) * time.Millisecond)
		h.broker.signal(syscall.SIGKILL)
		if !h.broker.wait(5 * time.Second) {
			return fmt.Errorf("the broker does not die")
		}
		start := time.Now()
		if err := h.startBroker(); err != nil {
			return err
		}
		for {
			x[1] = int64(i)
			if err = ro.ask(c, x); err == nil || time.Since(start) > 10*time.Second {
				break
			}
		}
		r.span("broker's death to the first answer of the next", time.Since(start))
		r.check(err == nil, "no answer after the broker's restart %d: %v", i, err)
		r.progress(i + 1)
	}
	h.endLoads("BrokerGone")
	_ = c.Close()
	h.settled(vitalsOf(h.broker.pid()))
	return nil
}

// poisonBatches has some inputs kill whoever runs them.
func poisonBatches(r *run) error {
	h, err := r.startHost(role{}, 0)
	if err != nil {
		return err
	}
	before := vitalsOf(h.broker.pid())
	stop := h.keepWorkers(3)
	for _, percent := range []float64{0.01, 0.03, 0.1} {
		if err := h.load(role{Load: 8, Pause: 500, Poison: percent}); err != nil {
			return err
		}
	}
	for s, err := h.stats(); ; s, err = h.stats() {
		if err != nil {
			return err
		}
		r.progress(int(s.Batches))
		if int(s.Batches) >= r.events {
			break
		}
		time.Sleep(50 * time.Millisecond)
	}
	sum := h.endLoads() // no innocent request may fail
	r.check(sum.Poisoned > 0, "nothing was poisonous")
	r.mu.Lock()
	r.passed += sum.OK + sum.Poisoned
	r.mu.Unlock()
	h.settled(before)
	stop()
	return nil
}
