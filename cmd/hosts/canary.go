// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"sync"
	"time"

	"github.com/ringbatch/ringbatch/internal/testbed"
)

// canary measures how late this machine lets a process run that only sleeps:
// what a deadline or a throughput is judged with on a machine that has other
// things to do.
type canary struct {
	begin time.Time
	mu    sync.Mutex
	worst []time.Duration // in each tenth of a second since begin
}

const (
	canaryNap = 5 * time.Millisecond
	tenth     = 100 * time.Millisecond
)

func newCanary(ctx context.Context) *canary {
	c := &canary{begin: time.Now()}
	go func() {
		for ctx.Err() == nil {
			before := time.Now()
			time.Sleep(canaryNap)
			c.note(before, time.Since(before)-canaryNap)
		}
	}()
	testbed.WatchCPUs(ctx.Done(), canaryNap, func(began time.Time) { c.note(began, time.Since(began)-canaryNap) })
	return c
}

// note keeps a delay for every tenth that it lay in.
func (c *canary) note(from time.Time, late time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	last := int(time.Since(c.begin) / tenth)
	for len(c.worst) <= last {
		c.worst = append(c.worst, 0)
	}
	for k := int(from.Sub(c.begin) / tenth); k <= last; k++ {
		c.worst[k] = max(c.worst[k], late)
	}
}

// since is the worst delay from then until now.
func (c *canary) since(then time.Time) (worst time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for k := max(0, int(then.Sub(c.begin)/tenth)); k < len(c.worst); k++ {
		worst = max(worst, c.worst[k])
	}
	return worst
}

// still tells in which share of the tenths between two times the machine kept a
// process waiting for longer than limit.
func (c *canary) still(from, to time.Time, limit time.Duration) float64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	n, slow := 0, 0
	for k := max(0, int(from.Sub(c.begin)/tenth)); k < min(len(c.worst), int(to.Sub(c.begin)/tenth)); k++ {
		n++
		if c.worst[k] > limit {
			slow++
		}
	}
	if n == 0 {
		return 0
	}
	return float64(slow) / float64(n)
}
