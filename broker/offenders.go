// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"sync"
	"time"

	"github.com/ringbatch/ringbatch/broker/engine"
)

// offenders remembers, for a while, which processes were thrown out: one that
// comes back at once has to wait, so that attaching and being thrown out again
// does not keep the broker from its work.
type offenders struct {
	mu   sync.Mutex
	last map[engine.Process]time.Time
}

const (
	offenderMemory = 5 * time.Second
	offenderPause  = 100 * time.Millisecond
)

func (o *offenders) add(p engine.Process) {
	if p == (engine.Process{}) { // one of many that look alike: the others did nothing
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	now := time.Now()
	for q, t := range o.last {
		if now.Sub(t) > offenderMemory {
			delete(o.last, q)
		}
	}
	if o.last == nil {
		o.last = map[engine.Process]time.Time{}
	}
	o.last[p] = now
}

// pause is how long a process has to wait before it is attached.
func (o *offenders) pause(p engine.Process) time.Duration {
	o.mu.Lock()
	defer o.mu.Unlock()
	if t, ok := o.last[p]; ok && time.Since(t) <= offenderMemory {
		return offenderPause
	}
	return 0
}
