// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"context"
	"sync"
	"time"
)

// idleness says since when nobody uses the broker. Its own processes, a gateway among them,
// use it only with requests.
type idleness struct {
	mu      sync.Mutex
	clients int
	since   time.Time // when the last client came or left; the start of Serve if there was none
}

func (i *idleness) count(clients int) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.clients += clients
	i.since = time.Now()
}

// longestLoad is how long a process that has not attached keeps the broker. Then it hangs.
const longestLoad = 10 * time.Minute

// awaitIdle returns after Config.Idle without a client and a request, or when ctx ends.
func (b *Broker) awaitIdle(ctx context.Context) {
	for left := b.cfg.Idle; left > 0; left = b.idleLeft() {
		select {
		case <-ctx.Done():
			return
		case <-time.After(left):
		}
	}
}

// idleLeft is how long the broker will stay if nobody comes.
func (b *Broker) idleLeft() time.Duration {
	b.idleness.mu.Lock()
	clients, idle := b.idleness.clients, time.Since(b.idleness.since)
	b.idleness.mu.Unlock()
	if clients > 0 {
		return b.cfg.Idle
	}
	processes, _ := b.super.Snapshot()
	for i := range processes {
		p := &processes[i]
		if !p.Attached && !p.Client && p.FailedStarts == 0 && p.SinceS < longestLoad.Seconds() {
			return b.cfg.Idle // it loads its model, and clients may wait for that
		}
	}
	for _, m := range b.models.listModels() {
		loads, _ := m.ring.Loads()
		for i := range loads {
			if idle = min(idle, loads[i].Idle); loads[i].Queued+loads[i].Busy > 0 {
				return b.cfg.Idle
			}
		}
	}
	return b.cfg.Idle - idle
}
