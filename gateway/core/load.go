// SPDX-License-Identifier: Apache-2.0

package core

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/ringbatch/ringbatch/gateway/oip"
)

type load struct {
	rows     atomic.Int64 // in flight
	answered atomic.Int64 // rows, ever

	mu        sync.Mutex // guards the fields below
	since     time.Time
	before    int64   // answered at since
	perSecond float64 // over the last interval
}

// loadInterval is the least time over which the rate is averaged.
const loadInterval = 500 * time.Millisecond

func (l *load) begin(rows int) (end func()) {
	l.rows.Add(int64(rows))
	return func() {
		l.rows.Add(-int64(rows))
		l.answered.Add(int64(rows))
	}
}

func (l *load) rate(now time.Time) float64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	if took := now.Sub(l.since); took > loadInterval {
		n := l.answered.Load()
		l.perSecond = float64(n-l.before) / took.Seconds()
		l.since, l.before = now, n
	}
	return l.perSecond
}

// LoadReport returns the model's load. Relays want it, and with ReportLoad every
// caller.
func (c *Call) LoadReport() (report oip.Load, wanted bool) {
	if c.runner != &c.relayed && !c.Model.G.Cfg.ReportLoad {
		return report, false
	}
	info := c.Model.info.Load()
	capacity := max(1, info.workers) * info.settings.MaxBatchSize
	report = oip.Load{
		Utilization: float64(c.Model.load.rows.Load()+int64(c.rows)) / float64(capacity),
		PerSecond:   c.Model.load.rate(time.Now()),
		Queue:       c.queue, Compute: c.compute,
	}
	if n := len(c.relayed.requests); n > 1 { // queue and compute are sums
		report.Queue, report.Compute = c.queue/time.Duration(n), c.compute/time.Duration(n)
	}
	return report, true
}
