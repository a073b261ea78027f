package broker

import (
	"sync"
	"time"
)

// offenders remembers, for a while, which processes were thrown out: one that
// comes back at once has to wait, so that attaching and being thrown out again
// does not keep the broker from its work.
type offenders struct {
	mu   sync.Mutex
	last map[int]time.Time // by pid
}

const (
	offenderMemory = 5 * time.Second
	offenderPause  = 100 * time.Millisecond
)

func (o *offenders) add(pid int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	now := time.Now()
	for p, t := range o.last {
		if now.Sub(t) > offenderMemory {
			delete(o.last, p)
		}
	}
	if o.last == nil {
		o.last = map[int]time.Time{}
	}
	o.last[pid] = now
}

// pause is how long a process has to wait before it is attached.
func (o *offenders) pause(pid int) time.Duration {
	o.mu.Lock()
	defer o.mu.Unlock()
	if t, ok := o.last[pid]; ok && time.Since(t) <= offenderMemory {
		return offenderPause
	}
	return 0
}
